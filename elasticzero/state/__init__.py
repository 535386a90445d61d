"""Represents the training state: named tensors, and the other objects that a script tracks."""
