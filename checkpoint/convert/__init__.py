"""Converts checkpoints to and from other formats: Hugging Face, DCP, and files of `torch.save`."""
