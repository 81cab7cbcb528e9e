"""This machine as the scheduler of runs, without Slurm: a guard process, and emulated nodes."""
