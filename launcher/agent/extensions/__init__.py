"""Lets more than its core take part in what an agent sees and serves."""
