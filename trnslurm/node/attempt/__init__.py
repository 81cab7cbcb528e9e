"""Runs the attempts of a phase: the last line of a batch script becomes this program.

    exec python -m trnslurm.node.attempt --max-crashes=3 --requeue -- srun … bash node.sh train

machine.py decides. It neither reads nor waits: it gets events and returns decisions. program.py
passes it the events and carries out the decisions, slow ones in threads.
"""
