"""Adapts frameworks that people train with: one module or package for each, by its name."""
