"""Decides how islands, each of which trains by itself, average what they have learnt. Pure."""
