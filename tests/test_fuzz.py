"""Every file that is read back, damaged at random: one line says so, and the rest is shown.

A short round runs with the other tests. `make fuzz` damages files for ten minutes, or for
FUZZ_MINUTES, and begins with FUZZ_SEED; a failure names the seed of its one case.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import random
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import trnslurm.cli
from trnslurm.cli import main
from trnslurm.contract.checkpoints import checkpoint_name
from trnslurm.contract.files import write_json
from trnslurm.records.run import RunDir

ROUND = 12
"""Cases of the short round."""
PATIENCE_S = 600
MEMORY_BYTES = 500 << 20
VICTIM, OTHER = "20260101-000000-victim", "20260102-000000-other"


@dataclass
class Place:
    """A file that may be damaged, and the commands that read it."""

    file: Path
    commands: tuple[tuple[str, ...], ...]


# -- damage


def scalars(chance: random.Random) -> Any:
    return chance.choice([
        None, True, -1, 0, 1, 3.5, float("nan"), float("inf"), 10**30, "", "x", "\x1b[31mred",
        "../../etc/passwd", "a\nb", "é" * 5000, "y" * 100_000, "1002", "\ud800", [], {}, [[]],
        [1] * 1000, {"a": {"b": []}}, ["x"], "2026-01-01T00:00:00Z",
    ])  # fmt: skip


def places_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Give every container of a tree with each of its keys."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in list(keys):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places_in(tree[key])


def other_value(chance: random.Random, text: bytes) -> bytes:
    """Replace, delete or add a value of a JSON tree, or of one of its lines."""
    lines = text.splitlines()
    try:
        tree, at = json.loads(text), None
    except RecursionError:
        return cut(chance, text)
    except ValueError:
        if not lines:
            return b"{}"
        at = chance.randrange(len(lines))
        try:
            tree = json.loads(lines[at])
        except ValueError:
            return other_line(chance, text)
    found = list(places_in(tree)) if isinstance(tree, dict | list) else []
    if found:
        container, key = chance.choice(found)
        what = chance.randrange(4)
        if what == 0:
            del container[key]
        elif what == 1 and isinstance(container, dict):
            container[str(scalars(chance))] = container[key]
        else:
            container[key] = scalars(chance)
    else:
        tree = scalars(chance)
    changed = json.dumps(tree).encode()
    return changed if at is None else b"\n".join([*lines[:at], changed, *lines[at + 1 :]]) + b"\n"


def other_line(chance: random.Random, text: bytes) -> bytes:
    """Replace what stands behind a colon or an equals sign in one line."""
    lines = text.splitlines() or [b""]
    at = chance.randrange(len(lines))
    for sign in (b": ", b"="):
        if sign in lines[at]:
            value = str(scalars(chance)).encode(errors="surrogatepass")
            lines[at] = lines[at].partition(sign)[0] + sign + value
    return b"\n".join(lines) + b"\n"


def other_bytes(chance: random.Random, text: bytes) -> bytes:
    for _ in range(chance.randrange(1, 8)):
        at = chance.randrange(len(text) + 1)
        new = chance.choice(
            [b"", b"\0", b"\xff\xfe", b'"', b"{", b"]", b"\n", b"- ", b"\t", b"&a "]
        )
        text = text[:at] + new + text[at + chance.randrange(4) :]
    return text


def cut(chance: random.Random, text: bytes) -> bytes:
    return text[: chance.randrange(len(text) + 1)]


def nested(chance: random.Random, text: bytes) -> bytes:
    depth, key = chance.choice([100, 1000, 100_000]), chance.choice(["a", "train", "jobs"])
    if chance.random() < 0.5:
        return b"[" * depth + b"]" * depth
    return f'{{"{key}": '.encode() * depth + b"1" + b"}" * depth


def references(chance: random.Random, text: bytes) -> bytes:
    """Return a little YAML that is a lot."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for number in range(1, 9):
        names = ", ".join([f"*a{number - 1}"] * 9)
        lines.append(f"a{number}: &a{number} [{names}]")
    key = chance.choice(["train", "env", "batch", "strategy", "description", "presets", "x"])
    return "\n".join([*lines, f"{key}: *a8", ""]).encode() + chance.choice([b"", text])


def become_another_kind(chance: random.Random, file: Path) -> None:
    """Replace a file by what is none, or is not to be read."""
    kind = chance.choice(["pipe", "directory", "zero", "loop", "nowhere", "huge", "socket", "none"])
    text = file.read_bytes()
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        (file / "x").mkdir(parents=True)
    elif kind in ("zero", "loop", "nowhere"):
        file.symlink_to({"zero": "/dev/zero", "loop": file, "nowhere": "/nowhere/at/all"}[kind])
    elif kind == "huge":
        file.write_bytes(text)
        os.truncate(file, 6 << 30)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener, contextlib.suppress(OSError):
            listener.bind(str(file))  # a path that is too long: the file is gone


REWRITES = (other_value, other_value, other_value, other_bytes, cut, nested)


def damage(chance: random.Random, file: Path) -> None:
    """Damage a file in a way that the chance decides."""
    rewrites = [*REWRITES, *([references, other_line] if file.suffix == ".yaml" else [])]
    if chance.random() < 0.25:
        become_another_kind(chance, file)
    else:
        for _ in range(chance.choice([1, 1, 2])):
            file.write_bytes(chance.choice(rewrites)(chance, file.read_bytes()))


# -- what is damaged


@pytest.fixture
def places(site, make_run, graphs, fake_slurm, cli, tmp_path: Path) -> list[Place]:
    """A victim of each kind with all its files, another run beside it, and who reads them."""
    for module in pkgutil.iter_modules(trnslurm.cli.__path__, "trnslurm.cli."):
        importlib.import_module(module.name)  # once, and not in every child
    made = cli("submit", "toy", "--cluster", "pc", "--nodes", "2")
    assert made.code == 0, made
    fake_slurm.forget_calls()
    run = site.run()
    run = RunDir(run.path.rename(site.run_root / VICTIM))
    record = json.loads(run.record_file.read_text())
    write_json(run.record_file, record | {"run": VICTIM})
    fill(run)
    make_run(OTHER, states={"train": [{"state": "COMPLETED"}]})
    reading = (
        ("runs",), ("runs", "--json"), ("status", VICTIM), ("status", VICTIM, "--json"),
        ("logs", VICTIM), ("logs", VICTIM, "--batch"), ("logs", VICTIM, "--node", "1"),
        ("metrics", VICTIM), ("metrics", VICTIM, "--json"), ("triage", VICTIM), ("doctor", VICTIM),
        ("resume", VICTIM), ("cancel", VICTIM), ("compile", "status"), ("usage", VICTIM),
        ("usage", VICTIM, "--json"), ("exporter",), ("report", "--since", "2020-01-01"),
        ("submit", "toy", "--cluster", "pc", "--from", VICTIM, "--dry-run"),
    )  # fmt: skip
    found = [Place(file, reading) for file in sorted(run.path.rglob("*")) if file.is_file()]
    found = [place for place in found if run.code not in place.file.parents]
    config = (
        ("recipes",), ("recipes", "--json"), ("clusters",), ("clusters", "--json"),
        ("show", "toy", "--cluster", "pc"), ("plan", "toy", "--cluster", "pc", "--nodes", "1,2"),
        ("render", "toy", "--cluster", "pc", "--nodes", "2"),
        ("submit", "toy", "--cluster", "pc", "--dry-run"),
    )  # fmt: skip
    settings = site.root / "trnslurm.yaml"
    settings.write_text("cluster: pc\n")
    Path("trnslurm.yaml").symlink_to(settings)
    files = [site.root / "jobs/toy/recipe.yaml", site.root / "cluster-config/pc.yaml", settings]
    found += [Place(file.absolute(), config) for file in files * 5]
    script = site.root / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2 --time=60\nA=x\nsrun python t.py $A\n")
    reads = (("adopt", str(script)), ("plan", str(script), "--cluster", "pc"))
    found += [Place(script.absolute(), reads)] * 5
    graphs.fill(graphs.facts(cli, "toy"))
    cache = (
        ("compile", "status"), ("compile", "status", "--json"), ("compile", "verify"),
        ("compile", "gc", "--older-than", "1s", "--yes"), ("compile", "key", "toy"),
        ("submit", "toy", "--cluster", "pc", "--dry-run"),
    )  # fmt: skip
    manifests = [file for file in graphs.cache.rglob("*.json") if file.is_file()]
    assert manifests
    found += [Place(file, cache) for file in manifests * 3]
    roots = tmp_path / "home/.local/state/trnslurm/run-roots"
    assert roots.exists()
    return [*found, Place(roots, (("runs",), ("status", "last")))]


def fill(run: RunDir) -> None:
    """Write what a run leaves in a run directory."""
    for phase in ("precompile", "train"):
        said = {"phase": phase, "attempt": 1, "state": "FAILED", "job_id": "1", "restarts": 0}
        said |= {"reason": "exit code 1", "exit_code": 1, "hosts": "n1,n2", "host": "n1", "pid": 7}
        write_json(run.state_file(phase, 1), said | {"started": "2026-01-01T00:00:00Z"})
        write_json(run.stop_file(phase, 1), {"cause": "time limit", "time": 1.0})
        node = {"host": "n1", "problems": ["no device"], "warnings": [], "facts": {"a": "b"}}
        write_json(run.preflight_file(phase, 1), {"nodes": [node, node | {"host": "n2"}]})
        for number in (0, 1):
            log = "step 1/30, loss 3.0\nTraceback (most recent call last):\nKeyError: 'lr'\n"
            run.node_log(phase, 1, number).write_text(log)
        run.batch_log(phase, "1001").write_text("train attempt 1: FAILED\n")
        failed = {"rank": 1, "host": "n1", "message": "boom", "time": 1.0, "error": "KeyError"}
        write_json(run.failed_file(phase, 1, 1), failed)
    write_json(run.excluded_file, {"nodes": {"n3": {"until": time.time() + 900, "why": "bad"}}})
    write_json(run.stuck_file("train", 1), {"rank": 1, "node": 0, "host": "n1", "step": 3})
    write_json(run.graphs_file(1, 0), {"host": "n1", "problem": "1 of 4 failed", "files": []})
    run.heartbeat_file.touch()
    use = {"phase": "train", "attempt": 1, "time": 1.0, "host": "n1", "kind": "GPU", "cpu": 0.5}
    use |= {"devices": [0, 1], "device_use": [0.9, None], "memory_left_gib": 9.0}
    notice = {"text": "GPU 1 did nothing", "since": 1.0, "until": None, "host": "n2"}
    for number in (0, 1):
        run.usage_file(number).parent.mkdir(exist_ok=True)
        run.usage_file(number).write_text(f"{json.dumps(use)}\n")
    write_json(run.notices_file("train", 1, 0), {"host": "n1", "notices": [notice]})
    write_json(run.pace_file("train", 1), {"step": 3, "workers": [[0, 1.0]], "notices": [notice]})
    line = {"attempt": 1, "steps": 30, "loss": 3.0, "samples_per_s": 2.0, "time": 1.0}
    lines = [json.dumps(line | {"step": step}) for step in range(1, 9)]
    run.metrics_file.write_text("\n".join(lines) + "\n")
    checkpoint = run.checkpoints / checkpoint_name(4)
    checkpoint.mkdir(parents=True)
    (checkpoint / "rank-00000-of-00001.safetensors").write_bytes(b"x" * 10)
    facts = {"recipe": "toy", "model.n_layer": 2}
    files = {"rank-00000-of-00001.safetensors": {"bytes": 10, "sha256": "0"}}
    manifest = {"step": 4, "samples": 8, "files": files, "facts": facts, "tensors": {}}
    write_json(checkpoint / "manifest.json", manifest)


# -- a case


def in_a_process(command: tuple[str, ...], place: Path) -> tuple[int, str, str]:
    """Run a command in a child with little time and memory; give its code and what it said."""
    out, err = place / "out", place / "err"
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            for number, file in ((1, out), (2, err)):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", errors="replace") for n in (1, 2))
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE_S)
            main(list(command))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 71
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, out.read_text(errors="replace"), err.read_text(errors="replace")


def one_case(seed: int, places: list[Place], tmp_path: Path) -> None:
    """Damage one file, run all who read it, and put everything back."""
    chance = random.Random(seed)
    place = chance.choice(places)
    world = ("site", "runs", "cache", "home", "slurm")
    for name in world:
        shutil.copytree(tmp_path / name, tmp_path / "before" / name, symlinks=True)
    try:
        damage(chance, place.file)
        for command in place.commands:
            code, out, err = in_a_process(command, tmp_path)
            what = f"seed {seed}: {place.file}: {' '.join(command)}: {code}\n{out[-2000:]}{err}"
            assert code in (0, 1, 2), what
            assert "Traceback" not in err, what
            assert len(err) < 5000, what
            for line in err.splitlines():
                of_script = line.startswith("Left out ") or " requests --" in line
                assert of_script or line.startswith(("error: ", "warning: ", "note: ")), what
            if command[0] == "runs":
                assert OTHER in out, what
    finally:
        for name in world:
            shutil.rmtree(tmp_path / name)
            (tmp_path / "before" / name).rename(tmp_path / name)


def test_a_short_round(places: list[Place], tmp_path: Path) -> None:
    for seed in range(ROUND):
        one_case(seed, places, tmp_path)


@pytest.mark.fuzz
def test_for_minutes(places: list[Place], tmp_path: Path, capfd: Any) -> None:
    end = time.monotonic() + 60 * float(os.environ.get("FUZZ_MINUTES", "10"))
    seed = first = int(os.environ.get("FUZZ_SEED") or time.time())
    failures: list[str] = []
    while time.monotonic() < end and len(failures) < 20:
        try:
            one_case(seed, places, tmp_path)
        except AssertionError as error:
            failures.append(str(error).split("\nassert ")[0])
        seed += 1
    with capfd.disabled():
        print(f"\n{seed - first} cases, {len(failures)} failures; the first seed was {first}")
    assert not failures, "\n\n".join(failures)
