"""Gives an island that comes the state of another one."""
