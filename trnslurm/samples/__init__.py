"""Which samples each step of a training has, and which of them a worker computes."""
