"""From text to the token files that trnslurm.train reads: the nodes' Python, without torch."""
