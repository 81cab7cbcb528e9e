"""`python -m trnslurm`, and the trnslurm command."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Ctrl-C prints one line, even during imports."""
    try:
        from trnslurm.cli import main as run
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    sys.path.pop(0)  # the user's directory, in which a file may have the name of a module
    main()
