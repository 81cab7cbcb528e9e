"""Schedulers: what starts the jobs of runs, and knows what became of them.

Only this package uses submitit. Its two executors are used through private seams that tests freeze:
the text of the submission file, the sbatch command, and `_submit_command`. No function is pickled,
and none of submitit's results or states is read.
"""
