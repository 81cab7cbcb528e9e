"""Reads a user's batch script and translates it, line by line, into trnslurm's terms."""
