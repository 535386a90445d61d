"""Where the bytes of checkpoints lie: disks, object stores, HTTP."""
