"""Which samples each step of a training run has, and which of them each worker computes."""
