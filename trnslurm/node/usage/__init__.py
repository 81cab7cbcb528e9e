"""What a node uses while a phase runs: a program of its own, which node.sh starts.

    (python -m trnslurm.node.usage --task=$$ --seconds=10 &)

host.py reads the kernel's counters; devices.py has the maker's tool (trnslurm.node.accelerators)
report, which runs beside this program and may be missing, slow or wrong; notice.py finds what a
person should know.
"""
