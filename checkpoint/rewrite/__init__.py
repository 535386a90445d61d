"""Checkpoints rewritten: another world size, strategy or dtype; and compared."""
