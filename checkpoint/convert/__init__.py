"""Other formats: Hugging Face, torch.distributed.checkpoint."""
