"""Holds what people look at and prepare a job with: nothing here takes part in a recovery.

The launcher imports none of it. `elasticzero.cli` adds its commands, and what agents serve of it.
"""
