"""Shows what happens in a job: metrics, the event log, and what follows from them."""
