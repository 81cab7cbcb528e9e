"""Measure the diagnosis on failures of strangers: `make triage`, a table by family.

triage_corpus/learn has the cases from which patterns may be made, and triage_corpus/fresh only
measures. README.md there describes a case.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trnslurm.node.triage.causes import all_causes
from trnslurm.node.triage.diagnosis import diagnose, nothing_found
from trnslurm.node.triage.finding import Finding

CORPUS = Path(__file__).with_name("triage_corpus")
PARTS = ("learn", "held", "fresh")
VERDICTS = ("right", "vague", "quoted", "silent", "wrong")
_HOSTS = "trn-1,trn-2"
_BESIDE = 12


def cases_in(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield all cases of a directory."""
    for file in sorted(directory.glob("*.toml")):
        yield from tomllib.loads(file.read_text(encoding="utf-8"))["case"]


def write_run(case: Mapping[str, Any], run: Path, beside: str = "") -> None:
    """Write the run directory that a case would leave: two nodes with eight workers each.

    `beside` comes before the log of each node.
    """
    for name in ("logs", "state"):
        (run / name).mkdir(parents=True)
    state = {"state": "FAILED", "hosts": _HOSTS, "job_id": "7", **case.get("state", {})}
    (run / "state/train-1.json").write_text(json.dumps(state))
    (run / "plan.json").write_text(json.dumps({"workers_per_node": 8}))
    for name, text in case["logs"].items():
        node = name.removeprefix("train-")
        log = "train-7.log" if name == "batch" else f"train-1-node{node}.log"
        before = "" if name == "batch" else beside
        (run / "logs" / log).write_text(before + text.lstrip("\n"), encoding="utf-8")


def judge(case: Mapping[str, Any], found: Finding | None, ended: str = "") -> str:
    """Return the verdict on a diagnosis.

    right: it names the cause; vague: it is true, but says too little; wrong: it names another
    cause. Where it names none: quoted, if it shows the telling line, or silent. `ended` is how the
    record says that the attempt ended, which is the whole diagnosis of an end from outside.
    """
    said = f"{found.cause}\n{found.fix}" if found and found.name else ended

    def matches(patterns: list[str]) -> bool:
        return all(re.search(pattern, said, re.IGNORECASE) for pattern in patterns)

    if said and matches(case["right"]):
        return "right"
    if not said or (found and found.kind == "effect"):
        shown = "\n".join(found.report()) if found else ""
        return "quoted" if case["telling"].strip()[:120] in shown else "silent"
    accepted = [[pattern] for pattern in case.get("not_wrong", ())]
    accepted += [case["vague"]] if case.get("vague") else []
    return "vague" if any(map(matches, accepted)) else "wrong"


def diagnose_case(case: Mapping[str, Any], beside: str = "") -> Finding | None:
    """Return the diagnosis of a case."""
    with tempfile.TemporaryDirectory() as directory:
        write_run(case, Path(directory), beside)
        return diagnose(Path(directory), "train", 1)


def how_it_ended(case: Mapping[str, Any]) -> str:
    """Return the diagnosis of an attempt in which no process failed."""
    with tempfile.TemporaryDirectory() as directory:
        write_run(case, Path(directory))
        return "\n".join(nothing_found(Path(directory), "train", 1))


class Healthy:
    """Usual lines of logs, some of which stand before each failure, and the steps that follow."""

    def __init__(self, lines: Sequence[str], *, steps: bool, seed: int = 1) -> None:
        self._lines, self._steps = [*lines], steps
        self._random = random.Random(seed)

    def text(self) -> str:
        """Return the beginning of a log."""
        if not self._lines:
            return ""
        lines = self._random.sample(self._lines, min(_BESIDE, len(self._lines)))
        steps = [f"step {n}/1000  loss {9 / n:.4f}  tokens/s {7000 + n}" for n in (10, 11, 12)]
        return "\n".join([*lines, *(steps if self._steps else []), ""])


def examples() -> list[str]:
    """Return a line of each known cause that a program prints: any of them may be harmless."""
    causes = (c for c in all_causes() if c.kind in ("cause", "effect") and c.example)
    of_programs = [c.example for c in causes if c.source in ("script", "python", "neuron")]
    return [
        line for line in of_programs if not re.match(r"(\[\w+\]: )?[\w.]*(Error|Exception)\b", line)
    ]


def main() -> int:
    """Print the verdicts by family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="fresh", choices=PARTS)
    parser.add_argument("--show", action="store_true", help="print each case that is not right")
    parser.add_argument("--beside", help="put lines of this file before each failure; or examples")
    parser.add_argument("--no-steps", action="store_true", help="without steps after those lines")
    options = parser.parse_args()
    lines = examples() if options.beside == "examples" else []
    if options.beside and not lines:
        lines = Path(options.beside).read_text(encoding="utf-8").splitlines()
    healthy = Healthy(lines, steps=not options.no_steps)
    table: dict[str, Counter[str]] = {}
    words: dict[str, Counter[str]] = {"cause:": Counter(), "likely:": Counter()}
    for case in cases_in(CORPUS / options.part):
        found = diagnose_case(case, healthy.text())
        verdict = judge(case, found, "" if found else how_it_ended(case))
        table.setdefault(case["family"], Counter())[verdict] += 1
        if found and found.name:
            words["cause:" if found.certain else "likely:"][verdict] += 1
        if options.show and verdict != "right":
            report = found.report() if found else ["(nothing)"]
            print(f"{case['id']}: {verdict}; {case['cause']}", *report, "", sep="\n  ")
    rows = [("family", "cases", *VERDICTS)]
    total: Counter[str] = Counter()
    for family, verdicts in sorted(table.items()):
        rows.append((family, str(verdicts.total()), *(str(verdicts[v]) for v in VERDICTS)))
        total += verdicts
    count = total.total() or 1
    rows.append(("all", str(total.total()), *(str(total[v]) for v in VERDICTS)))
    rows.append(("percent", "", *(f"{100 * total[v] / count:.0f}" for v in VERDICTS)))
    rows += [
        (f"said as {word}", str(said.total()), *(str(said[v]) for v in VERDICTS))
        for word, said in words.items()
    ]
    for row in rows:
        print(f"{row[0]:<22}", *(f"{cell:>7}" for cell in row[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
