"""The RAM tier: snapshots in shared memory, their replicas, and the way from there to storage."""
