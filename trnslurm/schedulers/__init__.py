"""Schedulers: they start the jobs of runs and know what became of the jobs.

Only this package uses submitit. It uses submitit's two executors through private interfaces, which
tests pin: the text of the submission file, the sbatch command, and `_submit_command`. It pickles no
functions, and reads none of submitit's results or states.
"""
