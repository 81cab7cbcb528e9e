"""Reads a user's batch script, and says it in trnslurm's terms: which line becomes what."""
