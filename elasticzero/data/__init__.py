"""Orders the samples, distributes them over the ranks, and reads them."""
