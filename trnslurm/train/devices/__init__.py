"""What a worker computes on, and its tie to the other workers."""
