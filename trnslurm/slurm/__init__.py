"""Calls Slurm's commands and explains their output in plain words."""
