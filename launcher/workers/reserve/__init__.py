"""Holds the processes from which a node's next workers come."""
