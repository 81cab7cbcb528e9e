"""This machine as a scheduler without Slurm: a guard process and emulated nodes."""
