"""A real Slurm cluster on one machine, in separate namespaces, with faults to inject."""
