"""Runs a whole cluster on this machine."""
