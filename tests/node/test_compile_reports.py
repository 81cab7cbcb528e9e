"""What is read out of neuron_parallel_compile's output, trap by trap.

Every case differs from a good one in what its trap is about alone, so that each turns red when the
check that sees it is taken out.
"""

from __future__ import annotations

import json

import pytest

from trnslurm.node.graphs.neuron import Report, problem

CACHE = "/fsx/cache/neuronxcc-2.26.6360.0+abcdef/"
HEAD = "2026-08-01 10:00:00.000604:  2308  INFO ||NEURON_PARALLEL_COMPILE||: "
WRAPPER = "2026-08-01 10:00:00.000604:  2308  INFO ||NEURON_CC_WRAPPER||: "


def graph(number: int) -> str:
    return f"{CACHE}MODULE_{number}+d41d8cd9"


def traced(*numbers: int) -> list[str]:
    """What the trial run says of graphs that are to be compiled."""
    return [
        f"{WRAPPER}Extracting graphs ({graph(n)}/model.hlo_module.pb) for ahead-of-time parallel "
        "compilation. No compilation was done."
        for n in numbers
    ]


def reported(**status: bool) -> list[str]:
    """The report, of graphs by number."""
    report = {
        f"{graph(int(n[1:]))}/model.hlo_module.pb": {"status": well, "retry": 0, "compile_time": 9}
        for n, well in status.items()
    }
    whole = {"compilation_summary": {"true": 1}, "compilation_report": report}
    return f"{HEAD}{json.dumps(whole, indent=4)}".split("\n")


def summary(total: int, well: int, failed: int) -> list[str]:
    return [
        f"{HEAD}Total graphs: {total}",
        f"{HEAD}Total successful compilations: {well}",
        f"{HEAD}Total failed compilations: {failed}",
    ]


GOOD = [*traced(1, 2), *reported(g1=True, g2=True), *summary(2, 2, 0)]
LATE_NO_TODO = f"{HEAD}No todo hlos found in cache or hlo_tasklist, parallel_compile return"
EXCEPTION = f"{HEAD}sub-process 3 got exception: A process in the process pool was terminated"
KILLED = f"{WRAPPER}parallel compilation with neuronx-cc exited with error.Received error code: -9"
GIVEN_UP = f"{WRAPPER}Got a cached failed neff at {graph(3)}/model.neff. Will skip compilation"
WAITING = f"[INFO]: Another process must be compiling {graph(1)}/model.hlo_module.pb"


def read(lines: list[str]) -> Report:
    report = Report()
    for line in lines:
        report.read(line)
    return report


def test_a_good_output_is_read() -> None:
    report = read(["loss 1.0", *GOOD])

    assert problem(report, 0) is None
    assert report.traced == report.compiled == report.graphs == {graph(1), graph(2)}
    assert report.totals["graphs"] == 2


def test_a_prefix_on_every_line_is_no_part_of_it() -> None:
    """As AWS's page of the tool shows it, and as a logger does that heads every line."""
    for prefix in ("INFO: ", "[INFO]: ", HEAD):
        report = read([f"{prefix}{line}" for line in GOOD])

        assert problem(report, 0) is None
        assert report.compiled == {graph(1), graph(2)}
        assert report.totals == {
            "graphs": 2, "successful compilations": 2, "failed compilations": 0
        }  # fmt: skip


def test_lines_of_others_within_the_report_are_no_part_of_it() -> None:
    lines = [*traced(1, 2), *reported(g1=True, g2=True)[:-1], "worker 3 has finished", "}"]

    assert read([*lines, *summary(2, 2, 0)]).compiled == {graph(1), graph(2)}


@pytest.mark.parametrize(
    ("lines", "ended"),
    [
        (traced(1), False),
        ([f"{HEAD}There was an error in the training script.", *GOOD], False),
        ([*traced(1), f"{HEAD}New graph list from script 1: "], True),
        (summary(3, 1, 2), True),
        ([LATE_NO_TODO], True),
        ([EXCEPTION], True),
    ],
)
def test_when_the_trial_run_is_known_to_have_ended(lines: list[str], ended: bool) -> None:
    assert read(lines).trial_ended is ended


def test_older_versions_name_themselves_otherwise() -> None:
    lines = [line.replace("NEURON_PARALLEL_COMPILE", "PARALLEL_COMPILE") for line in GOOD]

    assert problem(read(lines), 0) is None


@pytest.mark.parametrize(
    "lines",
    [
        [f"{WRAPPER}Using a cached neff at {graph(1)}/model.neff. Exiting", LATE_NO_TODO],
        [*traced(1), *reported(), *summary(0, 0, 0)],  # another node has it, or is at it
    ],
    ids=["found compiled", "another node's"],
)
def test_nothing_left_to_compile_is_success_where_the_graphs_are_named(lines: list[str]) -> None:
    report = read(lines)

    assert problem(report, 0) is None
    assert report.graphs == {graph(1)}
    assert not report.compiled


TRAPS = {
    "no graph, no summary": ([LATE_NO_TODO], 0, "found no graphs (No todo hlos found)"),
    "no graph, a summary": (summary(0, 0, 0), 0, "found no graphs (Total graphs: 0)"),
    "exception": ([EXCEPTION, *GOOD], 0, "a compile process died"),
    "failed, exit code 2": (
        [*reported(g1=False, g2=False, g3=True), *summary(3, 1, 2)],
        2,
        f"2 of 3 graphs could not be compiled, the first is {graph(1)}",
    ),
    "failed, an older version": (summary(3, 1, 2), 0, "2 of 3 graphs could not be compiled"),
    "256 failed": (summary(256, 0, 256), 0, "256 of 256 graphs could not be compiled"),
    "killed": ([KILLED, *summary(3, 1, 2)], 2, "NEURON_PARALLEL_COMPILE_MAX_RETRIES"),
    "script error": (
        [f"{HEAD.replace('INFO', 'ERROR')}There was an error in the training script."],
        1,
        "the trial run failed",
    ),
    "script error, compiled all the same": (
        [f"{HEAD}There was an error in the training script.", *GOOD],
        0,
        "the trial run failed",
    ),
    "stale lock": ([*traced(1), WAITING], -15, f"remove {graph(1)}/model.hlo_module.pb.lock"),
    "ended": (GOOD[:2], -9, "ended by signal 9"),
    "given up before": (
        [GIVEN_UP, *GOOD],
        0,
        f"interrupted, the first is {graph(3)}: add --retry_failed_compilation",
    ),
    "all given up before": ([GIVEN_UP, LATE_NO_TODO], 0, "1 graphs were skipped"),
    "exit code": (GOOD, 70, "exit code 70, although"),
    "no summary": (traced(1), 0, "without a summary"),
    "some are missing": (summary(3, 2, 0), 0, "2 of 3 graphs were compiled"),
    "report and summary differ": (
        [*reported(g1=True), *summary(2, 2, 0)],
        0,
        "its report lists 1 graphs, but its summary 2",
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_every_trap_has_its_own_reason(trap: str) -> None:
    lines, exit_code, reason = TRAPS[trap]
    said = problem(read(lines), exit_code)

    assert said is not None and reason in said
    assert "\n" not in said


def test_a_killed_compiler_that_succeeded_later_is_no_problem() -> None:
    assert problem(read([KILLED, *GOOD]), 0) is None


def test_a_report_that_cannot_be_read_is_left_to_the_summary() -> None:
    report = read([f"{HEAD}{{", "no json", "}", *summary(2, 2, 0)])

    assert report.compiled == set()
    assert problem(report, 0) is None
