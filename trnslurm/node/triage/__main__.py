"""Explains in a few lines why an attempt failed.

    python -m trnslurm.node.triage RUN_DIR [--phase train] [--attempt 2] [--json]

Batch scripts run this program after a failed attempt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trnslurm.contract.rundir import RunFiles
from trnslurm.node.triage.diagnosis import diagnose, nothing_found


def main(argv: Sequence[str] | None = None) -> int:
    """Print which rank or node failed first; return 1 if no failure was found."""
    parser = argparse.ArgumentParser(prog="python -m trnslurm.node.triage", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--phase", help="default: the newest attempt's")
    parser.add_argument("--attempt", type=int, help="default: the newest")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    newest = _newest(options.run, options.phase)
    if newest is None:
        print(
            f"error: {options.run}: no attempt has started in this directory",
            file=sys.stderr,
        )
        return 1
    phase, attempt = newest[0], options.attempt or newest[1]
    found = diagnose(options.run, phase, attempt)
    if options.json:
        print(json.dumps(asdict(found) if found else None, indent=2))
    else:
        print("\n".join(found.report() if found else nothing_found(options.run, phase, attempt)))
    return 0 if found else 1


def _newest(run: Path, phase: str | None) -> tuple[str, int] | None:
    files = RunFiles(run)
    found = [a for a in files.all_attempts() if phase in (None, a[0])]
    return max(found, key=lambda a: files.state_file(*a).stat().st_mtime_ns, default=None)


if __name__ == "__main__":
    sys.exit(main())
