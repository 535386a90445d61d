"""Sums the gradients of slices in one fixed order, so that no bit of them depends on the world."""
