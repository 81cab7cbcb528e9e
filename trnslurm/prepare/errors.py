"""Errors that end a preparation with one line on stderr and exit code 1."""


class PrepareError(Exception):
    """Something the user can fix; the message is one line that says where, what and what to do."""


class KeptError(Exception):
    """A problem outside the input, such as a full disk: finished work is kept."""


LEARNING = "learning a tokenizer"
"""The name of the thread that learns a tokenizer, which no signal ends."""
FETCHING = "s3"
"""How the names of the threads begin that fetch from S3, as in trnslurm.mirror.store."""
