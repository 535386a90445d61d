"""Defines what the bytes of a checkpoint mean: manifest, shards, checksums."""
