"""What a worker and its agent say to each other, and the socket that carries it."""
