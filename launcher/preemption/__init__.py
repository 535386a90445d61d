"""Watches for notices that this machine will be taken away."""
