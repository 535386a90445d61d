"""Starts, watches and ends the processes of one node's workers."""
