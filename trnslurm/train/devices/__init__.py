"""What a worker computes on, and its connection to the other workers."""
