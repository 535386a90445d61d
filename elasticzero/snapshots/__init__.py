"""Captures training state out of a worker, and restores it into one."""
