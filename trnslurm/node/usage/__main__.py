"""Records what this node uses, every few seconds, until its task ends.

    python -m trnslurm.node.usage --task=PID --node=N --seconds=10

It writes the first look, and then every minute the means of its looks, as a line in the run
directory's usage/nodeN.jsonl. state/notices-….json contains what a user should know. An error in
this program affects nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trnslurm.contract.files import write_json
from trnslurm.contract.variables import Variable
from trnslurm.devices import DEVICES
from trnslurm.node.accelerators.accelerator import accelerator_of
from trnslurm.node.guard import Watched
from trnslurm.node.state import RUN
from trnslurm.node.usage.devices import DeviceReport, Devices, DeviceUse
from trnslurm.node.usage.host import Figures, Host
from trnslurm.node.usage.machine import machine
from trnslurm.node.usage.notice import Look, Notices

LINE_S = 60.0
_MOST_BYTES = 1 << 20
_DEVICE = "device_"


def main() -> int:
    """Look until the task ends."""
    parser = argparse.ArgumentParser(prog="usage", allow_abbrev=False)
    parser.add_argument("--task", type=int, required=True, help="the node.sh process")
    parser.add_argument("--node", type=int, required=True, help="or the number of a role's server")
    parser.add_argument("--seconds", type=float, required=True, help="seconds between two looks")
    options = parser.parse_args()
    with suppress(OSError):
        os.nice(10)
    task = Watched(options.task)
    device = DEVICES.get(os.environ.get(Variable.DEVICE, ""))
    devices = Devices(accelerator_of(device).usage_tools(options.seconds))
    usage = NodeNotes(options.node, devices)
    try:
        # A standby step has no attempt yet.
        while not usage.begun():
            if task.ends_within(options.seconds):
                return 0
        usage.note_machine()
        while not task.ends_within(options.seconds):
            usage.look(time.time())
        usage.write(time.time())
    finally:
        devices.close()
    return 0


class NodeNotes:
    """One node's metrics in an attempt."""

    def __init__(self, node: int, devices: Devices) -> None:
        self._node, self._devices, self._host = node, devices, Host()
        self._phase, self._attempt = (
            os.environ[Variable.PHASE],
            int(os.environ[Variable.ATTEMPT]),
        )
        self._role = self._phase if Variable.SERVER in os.environ else ""
        self._notices = Notices(devices=self._phase == "train")
        self._figures: list[Figures] = []
        self._reports: list[DeviceReport] = []
        self._errors: dict[str, int] = {}
        self._written = 0.0
        self._write_ms = 0.0

    def begun(self) -> bool:
        return bool(self._role) or RUN.state_file(self._phase, self._attempt).exists()

    def note_machine(self) -> None:
        """Write which hardware and limits this node has, for the diagnosis of a failure."""
        with suppress(OSError):
            write_json(RUN.machine_file(self._phase, self._attempt, self._node), machine())

    def look(self, now: float) -> None:
        """Look once. Write a line when a minute has passed, and new notices at once."""
        figures, report = self._host.look(), self._devices.report()
        figures["write_ms"] = self._write_ms
        self._figures.append(figures)
        if report:
            self._reports.append(report)
            self._errors |= report.errors
        self._errors |= self._host.errors()
        if self._notices.look(Look(now, figures, report), self._errors):
            told = [{"text": n.text, "since": n.since, "until": n.until} for n in self._notices.all]
            facts = {"host": _host_name(), "notices": told}
            with suppress(OSError):
                write_json(RUN.notices_file(self._phase, self._attempt, self._node), facts)
        if now - self._written >= LINE_S:
            self.write(now)

    def write(self, now: float) -> None:
        """Write a line with the means since the last line."""
        line = {
            "time": round(now, 1),
            "phase": self._phase,
            "attempt": self._attempt,
            "host": _host_name(),
            **_means(self._figures),
            **_means_of_devices(self._reports),
        }
        if not self._figures:
            return
        if wrong := {name: number for name, number in self._errors.items() if number}:
            line["errors"] = wrong
        start = time.monotonic()
        with suppress(OSError):
            append(RUN.usage_file(self._node, self._role), json.dumps(line, separators=(",", ":")))
        self._write_ms = 1000 * (time.monotonic() - start)
        self._figures, self._reports, self._written = [], [], now


def append(file: Path, line: str) -> None:
    """Append a line to a file. If the file is long, first drop every other line."""
    file.parent.mkdir(exist_ok=True)
    with suppress(FileNotFoundError):
        if file.stat().st_size > _MOST_BYTES:
            kept = file.read_text(encoding="utf-8").splitlines(keepends=True)[::-2][::-1]
            shorter = file.with_name(f".{file.name}")
            shorter.write_text("".join(kept), encoding="utf-8")
            shorter.replace(file)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"{line}\n")


def _means(looks: Sequence[Figures]) -> Figures:
    names = dict.fromkeys(name for figures in looks for name in figures)
    return {name: round(statistics.fmean(f[name] for f in looks if name in f), 3) for name in names}


def _means_of_devices(reports: Sequence[DeviceReport]) -> dict[str, Any]:
    """Return the devices' numbers, and a list of means for each metric that their tool reports."""
    if not reports:
        return {}
    names = sorted({name for report in reports for name in report.devices})
    found: dict[str, Any] = {"kind": reports[-1].kind, "devices": names}
    for field in ("use", "memory_gib", "power_w", "mhz"):
        means = [
            _mean([getattr(r.devices.get(n, DeviceUse()), field) for r in reports]) for n in names
        ]
        if any(mean is not None for mean in means):
            found[f"{_DEVICE}{field}"] = means
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 3) if known else None


def _host_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


if __name__ == "__main__":
    sys.exit(main())
