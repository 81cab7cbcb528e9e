"""Runs the servers of a run's roles: starts them alongside training, and restarts failed ones."""
