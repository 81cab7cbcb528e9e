"""The diagnosis on failures of strangers: how many are right, and what may stand before them."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from .measure_triage import CORPUS, Healthy, cases_in, diagnose_case, examples, how_it_ended, judge


@pytest.mark.parametrize(("part", "right", "wrong"), [("learn", 0.8, 0.02), ("held", 0.8, 0.01)])
def test_few_diagnoses_are_wrong_and_none_with_certainty(
    part: str, right: float, wrong: float
) -> None:
    found = [(case, diagnose_case(case)) for case in cases_in(CORPUS / part)]
    said = [(f, judge(c, f, "" if f else how_it_ended(c))) for c, f in found]
    verdicts = Counter(verdict for _, verdict in said)
    assert verdicts["right"] > right * len(said), verdicts
    assert verdicts["wrong"] < wrong * len(said), verdicts
    certain = Counter(verdict for f, verdict in said if f and f.name and f.certain)
    assert not certain["wrong"], certain


def test_lines_before_steps_change_no_verdict() -> None:
    """Twelve lines that mean failures elsewhere, and three steps after them, before each case."""
    healthy = Healthy(examples(), steps=True)
    for case in cases_in(CORPUS / "learn"):
        alone, beside = diagnose_case(case), diagnose_case(case, healthy.text())
        assert judge(case, beside) == judge(case, alone), case["id"]


def test_usual_lines_before_a_failure_change_no_verdict() -> None:
    """Each line of healthy logs before each of 50 cases, ten at a time, no steps after them."""
    lines = Path(__file__).with_name("healthy_lines.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 200
    of_nodes = [case for part in ("learn", "held") for case in cases_in(CORPUS / part)]
    of_nodes = [case for case in of_nodes if set(case["logs"]) - {"batch"}]
    changed = set()

    def verdict(case: dict[str, Any], beside: str = "") -> str:
        """The verdict. Where no cause is known, few of the lines of a long log can be shown."""
        found = judge(case, diagnose_case(case, beside))
        return "quoted" if found == "silent" else found

    for case in of_nodes[:: len(of_nodes) // 50][:50]:
        alone = verdict(case)
        for few in (lines[at : at + 10] for at in range(0, len(lines), 10)):
            beside = "\n".join([*few, ""]).replace("\\n", "\n")  # of what is printed as two lines
            if verdict(case, beside) != alone:
                changed.add((case["id"], *few))
    assert not changed


@pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "PREEMPTED", "STOPPED"])
def test_an_end_from_outside_is_what_ended_the_job(state: str) -> None:
    """Whatever its workers print as they are ended; but for what Slurm itself says of it."""
    for case in islice(cases_in(CORPUS / "learn"), 0, None, 4):
        # None of the times in its logs is before this end.
        found = diagnose_case(case | {"state": {"state": state, "ended": "2000-01-01T00:00:00Z"}})
        of_slurm = found is None or found.name in ("oom-kill", "time-limit", "node-failed")
        assert of_slurm or (state == "TIMEOUT" and not found.certain), case["id"]


def test_a_node_that_the_record_names_is_the_cause() -> None:
    state = {"reason": "crash after step 30 was saved: trn-2 failed", "state": "FAILED"}
    for case in islice(cases_in(CORPUS / "learn"), 0, None, 40):
        found = diagnose_case(case | {"state": state})
        assert found and found.certain
        assert (found.name, found.host) == ("node-failed", "trn-2")
