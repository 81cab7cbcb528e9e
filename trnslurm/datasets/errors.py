"""The error of this room."""


class DataError(Exception):
    """Data that is missing, damaged or not read here; the message is one line: where, and what.

    It has one argument, because PyTorch raises a worker process's errors again with their text.
    """


class NoDataError(DataError):
    """A path that holds nothing of these formats."""
