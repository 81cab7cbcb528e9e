"""Why an attempt failed: the first failing rank, the cause and the fix, from records and logs.

Standard library and trnslurm.contract only, because the launcher and the batch scripts use it.
"""
