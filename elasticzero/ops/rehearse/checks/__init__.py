"""Compares the records of a rehearsal's runs, one check a file. Pure."""
