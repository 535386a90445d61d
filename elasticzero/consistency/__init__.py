"""Checks that what must be equal on all ranks is equal, and names the rank that differs."""
