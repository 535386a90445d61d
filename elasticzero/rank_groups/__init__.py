"""Names a group of ranks, and tells its connections from all others of the process."""
