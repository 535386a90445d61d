"""Runs the agent of one node, which observes, decides and acts."""
