"""Programs that keep the repository's own files true, and the demo of `make demo`."""
