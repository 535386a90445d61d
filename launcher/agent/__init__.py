"""The agent of one node: it observes, decides and acts."""
