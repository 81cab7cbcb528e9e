"""Reads the numbers that a custom script writes anyway, into the run's metrics.jsonl.

A script that calls trnslurm.report is not read. For any other, __main__.py runs on the first node:

    (python -m trnslurm.node.numbers --task=$$ &)

It reads the worker's log, and the files that TensorBoard, Lightning's CSVLogger, Hugging Face's
Trainer and Weights & Biases (offline) write below work/ and the directory of the checkpoints.
outside.py finds those elsewhere that are certainly this attempt's. One module parses each form,
without I/O. What a line means is decided by form, never by project, and a line that may mean two
things is left out: a wrong number is worse than none.
"""
