"""Notices that this machine will be taken away."""
