"""A whole cluster on this machine."""
