"""Plays islands that train and average, on virtual time and through drawn faults."""
