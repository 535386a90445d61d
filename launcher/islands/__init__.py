"""Exchanges what islands have learnt: keeps outer states, and computes them from contributions."""
