"""An agent holds, replicates and saves the state that its workers capture."""
