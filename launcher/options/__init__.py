"""Defines the options of the commands: their flags, variables, defaults and checks."""
