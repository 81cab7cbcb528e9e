"""Optimizers that all workers step together."""
