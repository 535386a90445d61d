"""Starts training from weights and optimizer state that another program has written."""
