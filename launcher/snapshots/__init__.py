"""What an agent does with the state that its workers capture: it holds, replicates and saves it."""
