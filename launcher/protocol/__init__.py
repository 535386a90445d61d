"""Holds every rule by which agents run a job. Pure: no clock, no file, no network."""
