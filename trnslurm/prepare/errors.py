"""Errors that end a preparation with one line on stderr and exit code 1."""


class PrepareError(Exception):
    """Something the user can fix; the one-line message says where, what is wrong and what to do."""


class KeptError(Exception):
    """A problem outside the input, such as a full disk; finished work is kept."""


LEARNING = "learning a tokenizer"
"""The name of the thread that trains a tokenizer, which no signal can end."""
FETCHING = "s3"
"""The prefix of the names of the threads that fetch from S3, as in trnslurm.mirror.store."""
