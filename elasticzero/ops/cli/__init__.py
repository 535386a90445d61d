"""Runs the commands of `elasticzero` that only look at a job, or prepare one."""
