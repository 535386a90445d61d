"""Trains an island: what it contributes to the rounds of all islands, and what it takes of them."""
