"""Holds the coordination store as an agent uses it: its interface, a cache of it, a membership in
it."""
