"""Checks what most often stops a job on one machine, and says what to mend."""
