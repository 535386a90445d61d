"""Shows what a job does now: a line that moves on a terminal, lines of the log elsewhere."""
