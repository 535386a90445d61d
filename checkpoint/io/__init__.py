"""Writes tensors to shards and reads them back."""
