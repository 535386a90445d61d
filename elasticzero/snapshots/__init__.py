"""How training state gets out of a worker and into it: when, what and where from."""
