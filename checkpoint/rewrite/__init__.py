"""Writes checkpoints anew for another world size, strategy or dtype, and compares them."""
