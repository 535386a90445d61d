"""What the bytes of a checkpoint mean: manifest, shards, checksums."""
