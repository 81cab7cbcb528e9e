"""The error that a user can fix."""


class TrainError(Exception):
    """Something the user can fix; the message is one line: where, what, and what to do."""
