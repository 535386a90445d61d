"""Holds what the processes of a job know each other by, and how they encrypt what they send."""
