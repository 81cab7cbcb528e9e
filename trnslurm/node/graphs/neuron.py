"""Reads the output of neuron_parallel_compile, because its exit code proves nothing.

The exit code is 0 when no graph was found, when one of its processes died during a compile, when
256 graphs failed, and before Neuron 2.23 after any failure. A node's report omits graphs that
another node has locked or compiled, so the output lines that name a graph decide about it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

GRAPH = "model.hlo_module.pb"
NEFF = "model.neff"
# ||PARALLEL_COMPILE|| in older versions.
_OF_THE_TOOL = re.compile(r".*\|\|(?:NEURON_)?PARALLEL_COMPILE\|\|: ?(.*)")
_TOTAL = re.compile(r"Total (graphs|successful compilations|failed compilations): (\d+)")
_TRACED = re.compile(r"Extracting graphs \(([^)]+)\)")
_REUSED = re.compile(rf"Using a cached neff\b.*?((?:/|\w+://).*)/{re.escape(NEFF)}")
_GIVEN_UP = re.compile(rf"Got a cached failed neff at ((?:/|\w+://).*)/{re.escape(NEFF)}")
_WAITING = re.compile(rf"Another process must be compiling (.+/{re.escape(GRAPH)}|\S+?)(?:,|\s|$)")
_KILLED = re.compile(r"Received error code: -9\b")
# The JSON after a prefix: AWS's page about the tool shows INFO: before every line of its output,
# including the report's lines.
_JSON = re.compile(r'[{}"].*')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass
class Report:
    """The output read so far; graphs are named by their directories."""

    totals: dict[str, int] = field(default_factory=dict)
    traced: set[str] = field(default_factory=set)
    """Graphs that the trial run found for the first time and that must be compiled."""
    reused: set[str] = field(default_factory=set)
    """Graphs that were compiled before."""
    given_up: set[str] = field(default_factory=set)
    """Graphs that were skipped because an earlier compile of them failed or was interrupted."""
    compiled: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    trial_ended: bool = False
    """Whether the trial run has succeeded, so that its graphs are being compiled."""
    script_error: bool = False
    exception: bool = False
    nothing_to_do: bool = False
    killed: bool = False
    waiting_for: str | None = None
    """The graph of the last lock in the output."""
    _json: list[str] | None = None
    """The lines of an unfinished compilation report."""
    _depth: int = 0
    """The number of open braces in the report."""

    @property
    def graphs(self) -> set[str]:
        """All graphs that this node needs."""
        return self.traced | self.reused | self.compiled | self.failed | self.given_up

    def read(self, line: str) -> None:
        """Read the next line."""
        if self._json is not None and (json_text := _JSON.search(line)):
            self._read_report(json_text[0])
            return
        self.traced |= {_directory(path) for path in _TRACED.findall(line)}
        self.reused |= set(_REUSED.findall(line))
        self.given_up |= set(_GIVEN_UP.findall(line))
        self.killed |= bool(_KILLED.search(line))
        if waiting := _WAITING.search(line):
            self.waiting_for = _directory(waiting[1])
        if said := _OF_THE_TOOL.search(line):
            self._read_own(said[1].strip())

    def _read_own(self, text: str) -> None:
        if text == "{":
            self._json, self._depth = [text], 1
        if total := _TOTAL.match(text):
            self.totals[total[1]] = int(total[2])
        self.script_error |= "There was an error in the training script" in text
        self.exception |= "got exception" in text
        self.nothing_to_do |= "No todo hlos found" in text
        # The first output after the trial run; older versions print only the last of these.
        ended = "New graph list from script" in text or total or self.exception
        self.trial_ended |= bool(ended or self.nothing_to_do) and not self.script_error

    def _read_report(self, line: str) -> None:
        assert self._json is not None
        self._json.append(line)
        braces = _STRING.sub("", line)
        self._depth += braces.count("{") - braces.count("}")
        if self._depth > 0:
            return
        text, self._json = "\n".join(self._json), None
        try:
            graphs = json.loads(text)["compilation_report"].items()
            ended = {_directory(path): bool(result["status"]) for path, result in graphs}
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # the totals will not match
        self.compiled |= {graph for graph, well in ended.items() if well}
        self.failed |= {graph for graph, well in ended.items() if not well}


def problem(report: Report, exit_code: int) -> str | None:
    """Return the main reason why the compile failed, in one line, or None if it succeeded."""
    return next(_problems(report, exit_code), None)


def _problems(report: Report, exit_code: int) -> Iterator[str]:
    total, well, failed = (
        report.totals.get(name)
        for name in ("graphs", "successful compilations", "failed compilations")
    )
    if exit_code < 0 and report.waiting_for and total is None:
        yield (
            f"it was ended while it waited for the process that compiles {report.waiting_for}: if "
            f"no such process exists, remove {report.waiting_for}/{GRAPH}.lock"
        )
    if exit_code < 0:
        yield f"it was ended by signal {-exit_code}"
    if report.script_error:
        yield "the trial run failed, so nothing was compiled: its error is above"
    if failed and report.killed:
        yield (
            f"the compiler was killed on {_some(failed, total)}, probably out of memory: set "
            'neuron.env.NEURON_PARALLEL_COMPILE_MAX_RETRIES="1"'
        )
    if failed:
        yield f"{_some(failed, total)} could not be compiled{_first(report.failed)}"
    if given_up := report.given_up - report.compiled:
        yield (
            f"{len(given_up)} graphs were skipped because an earlier compile of them failed or was "
            f"interrupted{_first(given_up)}: add --retry_failed_compilation to neuron.cc_flags"
        )
    if report.exception:
        yield "a compile process died without reporting its graphs (got exception): run it again"
    if exit_code:
        yield f"exit code {exit_code}, although it reports no failed graphs"
    if total is None and not (report.nothing_to_do and report.reused):
        yield (
            "the trial run found no graphs (No todo hlos found): does the job train on its device?"
            if report.nothing_to_do
            else "it ended without a summary"
        )
    if total is not None and well != total:
        yield f"only {well or 0} of {total} graphs were compiled; the others are not mentioned"
    if total == 0 and not report.graphs:
        yield "the trial run found no graphs (Total graphs: 0): does the job train on its device?"
    if total is not None and report.compiled and len(report.compiled) != total:
        yield f"its report lists {len(report.compiled)} graphs, but its summary {total}"


def _some(failed: int, total: int | None) -> str:
    return f"{failed} of {total} graphs" if total else f"{failed} graphs"


def _first(failed: set[str]) -> str:
    return f", the first is {min(failed)}" if failed else ""


def _directory(path: str) -> str:
    directory, _, name = path.rpartition("/")
    return directory if name.startswith("model.") else path
