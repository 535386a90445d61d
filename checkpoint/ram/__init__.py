"""Implements the RAM tier: snapshots in shared memory, their replicas and their copy to storage."""
