"""The errors that trnslurm.datasets raises."""


class DataError(Exception):
    """Data is missing, damaged or unsupported; the one-line message says where, and what is wrong.

    The error has a single argument, because PyTorch raises a worker process's errors again from
    their message.
    """


class NoDataError(DataError):
    """The path contains no data in a supported format."""
