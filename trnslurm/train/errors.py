"""Errors that users see as one line."""


class TrainError(Exception):
    """A problem that the user can fix. The one-line message says where, what, and what to do."""


class MachineError(TrainError):
    """A problem of this machine. A retry is worthwhile, because another machine may work."""
