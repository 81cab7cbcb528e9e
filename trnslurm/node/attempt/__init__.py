"""Runs the attempts of a phase: the last line of a batch script becomes this program.

    exec python -m trnslurm.node.attempt --max-crashes=3 --requeue -- srun … bash node.sh train

machine.py decides, and neither reads nor waits: it is told events, and answers with decisions.
program.py tells it the events and carries the decisions out, the slow ones in threads.
"""
