"""Reads what other programs save with `torch.save`, and runs nothing that the files name."""
