"""A worker's words on its standard output."""


def say(line: str) -> None:
    """Print a line, if whatever takes it can."""
    try:
        print(line, flush=True)
    except OSError:
        pass
