"""Strategy `zero3`: torch's FSDP2 divides a model among the ranks, and here among those of another
world too."""
