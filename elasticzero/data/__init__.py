"""The samples that each rank takes, their order, and how they are read."""
