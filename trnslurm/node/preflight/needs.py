"""What a job needs of a node, what a check finds, and running all checks side by side."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the job needs of a node."""

    run: Path
    phase: str
    nodes: int = 1
    device: str = "cpu"
    devices: int = 0
    """Neuron devices of the instance type."""
    workers: int = 1
    """Workers on this node: each needs a NeuronCore or a GPU."""
    efa: int = 0
    data: str = ""
    caches: tuple[str, ...] = ()
    min_free: int = 256 * MIB
    """Bytes that must be free where something is written."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a check found: a fact for a table, and what is wrong and what to do about it."""

    fact: str = ""
    problem: str = ""
    warning: str = ""


Check = Callable[[Needs], Checked]


def run_all(needs: Needs, checks: Mapping[str, Check], timeout_s: float) -> dict[str, Checked]:
    """Run the checks side by side; what has not ended by then is a problem of its own."""
    found: dict[str, Checked] = {}

    def run(name: str, check: Check) -> None:
        try:
            found[name] = check(needs)
        except OSError as error:
            found[name] = Checked(problem=f"{error.filename or name}: {error.strerror}")
        except Exception as error:  # this node could not say that it is fit
            found[name] = Checked(problem=f"looking at its {name} failed ({error!r})")

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hung = Checked(problem=f"looking at it took over {timeout_s:g} s: is a file system dead?")
    return {name: found.get(name, hung) for name in checks}
