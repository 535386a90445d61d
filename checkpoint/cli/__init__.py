"""Implements `elasticzero checkpoint`, the commands that inspect and convert checkpoints."""
