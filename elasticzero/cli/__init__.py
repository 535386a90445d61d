"""Puts the command line together: commands of the launcher, of the wing and of checkpoints."""
