"""Implements what a script does with its session: prepare, loop over batches, step, evaluate."""
