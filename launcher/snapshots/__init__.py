"""Holds, replicates and saves the state that the workers of a node capture."""
