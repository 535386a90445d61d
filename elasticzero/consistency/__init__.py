"""What must be equal on all ranks, and how they find out that it is not."""
