"""What the training state is: named tensors, and what else a script tracks."""
