"""Errors that users see as one line."""


class TrainError(Exception):
    """A problem that the user can fix; the message is one line: where, what, and what to do."""


class MachineError(TrainError):
    """A problem of this machine: the run may succeed on another, so it is worth a retry."""
