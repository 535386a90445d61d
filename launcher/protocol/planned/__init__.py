"""Decides how a planned change of the world happens inside the loops of the workers that stay."""
