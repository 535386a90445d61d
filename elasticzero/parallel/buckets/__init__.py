"""Keeps parameters in flat buckets: their layout, and what ranks exchange of them."""
