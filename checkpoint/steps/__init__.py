"""Which steps a checkpoint directory holds: commit, choice, verification, retention."""
