"""The processes of one node's workers: how they start, are watched and end."""
