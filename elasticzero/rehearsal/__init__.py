"""Records what a worker's training state is at each step, for `elasticzero rehearse`."""
