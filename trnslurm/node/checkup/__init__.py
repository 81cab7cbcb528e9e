"""A node's part of `trnslurm doctor --run`; program.py has the order of things."""
