"""Slurm's commands: the only place that calls them, and what their words mean."""
