"""Which samples a rank takes in which order, and how they are read."""
