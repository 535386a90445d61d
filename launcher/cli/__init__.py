"""Runs the command line `elasticzero`."""
