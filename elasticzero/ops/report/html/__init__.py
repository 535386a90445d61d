"""Writes a `RunSummary` as one page of HTML, with its style and pictures inside."""
