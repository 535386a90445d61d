"""Reads streams, whose samples have no index: each sample once, and the same global batches in
every world."""
