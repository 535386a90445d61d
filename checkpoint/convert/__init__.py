"""Converts checkpoints to and from other formats: Hugging Face, torch.distributed.checkpoint."""
