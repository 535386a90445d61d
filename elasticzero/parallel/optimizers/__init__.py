"""Describes the script's optimizers: their groups, what they work on, and their state."""
