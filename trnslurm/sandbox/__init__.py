"""A real Slurm cluster on one machine, in namespaces of its own, and faults to put into it."""
