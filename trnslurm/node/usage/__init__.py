"""Measures what a node uses while a phase runs: a separate program, started by node.sh.

    (python -m trnslurm.node.usage --task=$$ --seconds=10 &)

host.py reads the kernel's counters. devices.py runs the vendor's tool (trnslurm.node.accelerators),
which may be missing, slow or wrong. notice.py finds what a user should know.
"""
