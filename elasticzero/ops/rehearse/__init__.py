"""Rehearses a script: trains it for a few steps through faults, and compares what comes of it."""
