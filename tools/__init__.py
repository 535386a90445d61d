"""Programs that keep the repository's own files true."""
