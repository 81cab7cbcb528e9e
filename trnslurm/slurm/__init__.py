"""Calls Slurm's commands, and explains their answers in plain words."""
