"""Trains an island in the loops of a script."""
