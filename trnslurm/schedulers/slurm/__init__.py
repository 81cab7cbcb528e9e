"""Slurm as the scheduler of runs. Slurm's commands are called in trnslurm/slurm."""
