"""Frameworks that people train with, on real clusters through faults."""
