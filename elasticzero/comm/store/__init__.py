"""The store at which the ranks of a generation meet: a table in rank 0's process that only they can
reach."""
