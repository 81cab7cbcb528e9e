"""The errors that are said in one line."""


class TrainError(Exception):
    """Something the user can fix; the message is one line: where, what, and what to do."""


class MachineError(TrainError):
    """One that another machine may not meet, so that the attempt is not the run's last."""
