"""Checks that configuration and state that must be equal on all ranks are equal, and names the rank
that differs."""
