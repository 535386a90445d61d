"""Connects the ranks of a generation: rendezvous, control words, process groups."""
