"""Forks the workers of a node from one process that has done the heavy imports."""
