"""Prepares a world that is entered inside of the loops of another one."""
