"""The script's optimizers: their groups, what they work on, and the state that they keep."""
