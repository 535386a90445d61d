"""Defines the messages between a worker and its agent, and the socket that carries them."""
