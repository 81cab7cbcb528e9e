"""A real Slurm cluster on one machine, in separate namespaces, and faults to inject."""
