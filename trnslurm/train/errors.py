"""The error that a user can fix."""


class TrainError(Exception):
    """Something the user can mend; the message is one line that says where, what and what to do."""
