"""Reads and writes the files of checkpoints on disks, in object stores and over HTTP."""
