"""Sums gradients over ranks in fewer bytes than they have in memory (`--wire`)."""
