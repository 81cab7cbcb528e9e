"""Keeps the servers of a run's roles: starts them beside the training, and again if they fail."""
