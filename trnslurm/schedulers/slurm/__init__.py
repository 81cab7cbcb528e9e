"""Slurm as the scheduler of runs; its commands are in trnslurm/slurm."""
