"""Makes what the report of a run and the status page both draw: markup, charts and their style."""
