"""Serves an agent's metrics, status and snapshots over HTTP."""
