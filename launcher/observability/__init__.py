"""What can be seen of a job: metrics, the event log, and what follows from them."""
