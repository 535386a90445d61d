"""Manages the steps of a checkpoint directory: commit, catalog, verification, retention."""
