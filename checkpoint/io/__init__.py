"""Tensors to shards and back."""
