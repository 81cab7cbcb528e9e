"""What neuron_parallel_compile reports. Its exit code alone proves nothing.

It is 0 when no graph was found, when one of its processes died while compiling, when 256 graphs
failed, and before Neuron 2.23 after any failure. A graph that another node has locked, or has
compiled already, is in no report of this node: so each graph is judged by the lines that name it.
"""

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
# What follows a prefix: AWS's page of the tool shows its output with INFO: before every line, those
# of the report too.
_JSON = re.compile(r'[{}"].*')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass
class Report:
    """What was read of the output so far; graphs go by the directories in which they lie."""

    totals: dict[str, int] = field(default_factory=dict)
    traced: set[str] = field(default_factory=set)
    """What the trial run met for the first time, and left to be compiled."""
    reused: set[str] = field(default_factory=set)
    """What it found compiled."""
    given_up: set[str] = field(default_factory=set)
    """What it skipped, since an earlier compile of it failed or was interrupted."""
    compiled: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    trial_ended: bool = False
    """The trial run has ended well, and what it met is being compiled."""
    script_error: bool = False
    exception: bool = False
    nothing_to_do: bool = False
    killed: bool = False
    waiting_for: str | None = None
    """The graph of the last lock that it spoke of."""
    _json: list[str] | None = None
    """The lines of the compilation report, while it is read."""
    _depth: int = 0
    """Its braces that are still open."""

    @property
    def graphs(self) -> set[str]:
        """All that this node needs."""
        return self.traced | self.reused | self.compiled | self.failed | self.given_up

    def read(self, line: str) -> None:
        """Take in the next line."""
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
        # The first words after the trial run; older versions have only the last ones.
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
            return  # in the totals it is missed
        self.compiled |= {graph for graph, well in ended.items() if well}
        self.failed |= {graph for graph, well in ended.items() if not well}


def problem(report: Report, exit_code: int) -> str | None:
    """Say why this is not a success, in one line; the most telling reason first."""
    return next(_problems(report, exit_code), None)


def _problems(report: Report, exit_code: int) -> Iterator[str]:
    total, well, failed = (
        report.totals.get(name)
        for name in ("graphs", "successful compilations", "failed compilations")
    )
    if exit_code < 0 and report.waiting_for and total is None:
        yield (
            f"it was ended while it waited for whoever compiles {report.waiting_for}: if nobody "
            f"does, remove {report.waiting_for}/{GRAPH}.lock"
        )
    if exit_code < 0:
        yield f"it was ended by signal {-exit_code}"
    if report.script_error:
        yield "the trial run failed, so nothing was compiled: its error is above"
    if failed and report.killed:
        yield (
            f"the compiler was killed on {_some(failed, total)}, mostly for lack of memory: set "
            'neuron.env.NEURON_PARALLEL_COMPILE_MAX_RETRIES="1"'
        )
    if failed:
        yield f"{_some(failed, total)} could not be compiled{_first(report.failed)}"
    if given_up := report.given_up - report.compiled:
        yield (
            f"{len(given_up)} graphs are left out, as an earlier compile of them failed or was "
            f"interrupted{_first(given_up)}: add --retry_failed_compilation to neuron.cc_flags"
        )
    if report.exception:
        yield "a process of it died, and its graphs are in no report (got exception): run it again"
    if exit_code:
        yield f"exit code {exit_code}, though it reports no failed graph"
    if total is None and not (report.nothing_to_do and report.reused):
        yield (
            "the trial run met no graph (No todo hlos found): does the job train on its device?"
            if report.nothing_to_do
            else "it ended without a summary"
        )
    if total is not None and well != total:
        yield f"{well or 0} of {total} graphs were compiled, and nothing is said of the others"
    if total == 0 and not report.graphs:
        yield "the trial run met no graph (Total graphs: 0): does the job train on its device?"
    if total is not None and report.compiled and len(report.compiled) != total:
        yield f"its report names {len(report.compiled)} graphs, its summary {total}"


def _some(failed: int, total: int | None) -> str:
    return f"{failed} of {total} graphs" if total else f"{failed} graphs"


def _first(failed: set[str]) -> str:
    return f", the first is {min(failed)}" if failed else ""


def _directory(path: str) -> str:
    directory, _, name = path.rpartition("/")
    return directory if name.startswith("model.") else path
