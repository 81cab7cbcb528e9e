"""Reads the metrics that a custom script writes in its own format into the run's metrics.jsonl.

A script that calls trnslurm.report is not read. For any other script, __main__.py runs on the first
node:

    (python -m trnslurm.node.numbers --task=$$ &)

It reads the worker's log, and the files that TensorBoard, Lightning's CSVLogger, Hugging Face's
Trainer and Weights & Biases (offline) write below work/ and in the checkpoint directory. outside.py
finds files elsewhere that certainly belong to this attempt. Each format has a module that parses it
without I/O. The format decides what a line means, never the project. A line that may mean two
things is left out, because a wrong number is worse than none.
"""
