"""From text to the token files that trnslurm.train reads, with the nodes' Python and no torch."""
