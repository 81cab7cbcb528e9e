"""Lines on a worker's standard output."""


def say(line: str) -> None:
    """Print a line; a full disk or a closed pipe is ignored."""
    try:
        print(line, flush=True)
    except OSError:
        pass
