"""A site to submit to, and run directories as submissions and batch scripts leave them."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trnslurm.config import load
from trnslurm.contract.attempt import Attempt
from trnslurm.contract.files import write_json
from trnslurm.node.graphs.manifest import GraphCache, GraphManifest, NodeResult
from trnslurm.records.run import Record, RunDir

PROFILE: dict[str, Any] = {
    "description": "A cluster of stand-ins",
    "scheduler": "slurm",
    "instance_type": "trn1.32xlarge",
    "python": "/shared/venv/bin/python",
    "slurm": {"partition": "compute", "max_nodes": 4},
}
# On two nodes: 128 samples/s, so 5 hours, 10 node-hours and 215 dollars.
TOY = """\
steps: 36000
batch: {global_batch: 64}
reference: [{instance_type: trn1.32xlarge, nodes: 1, samples_per_s: 64}]
"""


class Site:
    """A search path of the user's own with one cluster, `pc`, and where its runs are."""

    def __init__(self, root: Path, run_root: Path) -> None:
        self.root, self.run_root = root, run_root

    def profile(self, name: str = "pc", **changes: Any) -> Path:
        """Write a cluster profile."""
        tree = PROFILE | {"run_root": str(self.run_root)} | changes
        return self.write(f"cluster-config/{name}.yaml", yaml.safe_dump(tree))

    def recipe(self, text: str = TOY, name: str = "toy") -> Path:
        """Write a recipe with a job that does nothing."""
        self.write(f"jobs/{name}/train.py", "print('trained')\n")
        return self.write(f"jobs/{name}/recipe.yaml", text)

    def write(self, name: str, text: str) -> Path:
        """Write one file of the search path."""
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def here(self, program: str) -> None:
        """Write the cluster `here`: this machine, where bash lines stand in for the launcher."""
        python = self.run_root.with_name("a python")
        python.write_text(
            f'#!/bin/bash\nif [ "$2" != trnslurm.node.launcher ]; then\n'
            f"  exec '{sys.executable}' \"$@\"\nfi\n{program}\n"
        )
        python.chmod(0o755)
        self.profile(
            "here", scheduler="local", instance_type="local", device="cpu", workers_per_node=1,
            python=str(python), slurm={},
        )  # fmt: skip

    def runs(self) -> list[RunDir]:
        """The run directories there are."""
        found = sorted(self.run_root.glob("[!.]*"))  # not the compile cache
        return [RunDir(directory) for directory in found]

    def run(self) -> RunDir:
        """The one run there is."""
        (run,) = self.runs()
        return run


@pytest.fixture
def site(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site with the cluster `pc`, on the search path; the host's own site file is not read."""
    site = Site(tmp_path / "site", tmp_path / "runs")
    site.profile()
    monkeypatch.setenv("TRNSLURM_PATH", str(site.root))
    monkeypatch.setattr(load, "SITE_FILE", tmp_path / "no-site.yaml")
    monkeypatch.setattr(load, "DEVICE_FILES", tmp_path)
    return site


@pytest.fixture
def make_run(site: Site) -> Callable[..., RunDir]:
    """Make the directory of a run, as submission and the batch scripts would leave it."""

    def make(
        name: str = "20260101-000000-gpt",
        *,
        states: dict[str, list[dict[str, Any]]] | None = None,
        heartbeat_age_s: float | None = None,
        steps: int = 30,
        **fields: Any,
    ) -> RunDir:
        run = RunDir(site.run_root / name)
        run.path.mkdir(mode=0o700, parents=True)
        run.logs.mkdir()
        run.state.mkdir()
        record = {
            "run": name, "name": "gpt", "recipe": "gpt2_zero1", "preset": "tiny", "cluster": "pc",
            "scheduler": "slurm", "nodes": 2, "phases": ("precompile", "train"),
            "created": "2026-01-01T00:00:00Z", "user": getpass.getuser(),
            "host": socket.gethostname(), "jobs": {"precompile": "1001", "train": "1002"},
        }  # fmt: skip
        run.write_record(Record(**record | fields))
        run.plan_file.write_text(json.dumps({"steps": steps}))
        for phase, attempts in (states or {}).items():
            for number, attempt in enumerate(attempts, 1):
                write_attempt(run, phase, number, **attempt)
        if heartbeat_age_s is not None:
            run.heartbeat_file.touch()
            then = time.time() - heartbeat_age_s
            os.utime(run.heartbeat_file, (then, then))
        return run

    return make


class Graphs:
    """The compile cache of the cluster `pc`, and a Python there that says its versions."""

    def __init__(self, site: Site, root: Path) -> None:
        self._site, self.cache, self._python = site, root / "cache", root / "pythön 3"
        self.files = GraphCache(self.cache)
        self.say_versions(torch="2.9.1", neuronx_cc="2.26.1")

    def say_versions(self, **versions: str) -> None:
        """Write the Python anew."""
        packages = {name.replace("_", "-"): version for name, version in versions.items()}
        answer = json.dumps({"packages": packages})
        self._python.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{answer}'\n")
        self._python.chmod(0o755)

    def profile(self, **changes: Any) -> None:
        """Write the profile `pc` with both."""
        self._site.profile(
            **{"python": str(self._python), "compile_cache": str(self.cache)} | changes
        )

    def facts(self, cli: Any, *arguments: str) -> dict[str, Any]:
        """What `compile key --json` says."""
        done = cli("compile", "key", *arguments, "--cluster", "pc", "--json")
        assert (done.code, done.err) == (0, "")
        return dict(json.loads(done.out))

    def fill(
        self, facts: dict[str, Any], *files: str, seconds: float = 1800.0, run: str = "an-older-run"
    ) -> str:
        """Compile what these facts say into these files of the cache; return the key."""
        key = str(facts["key"])
        names = files or (f"neuronxcc-2/MODULE_{key}/model.neff",)
        for name in names:
            (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
            (self.cache / name).write_text(f"graph {name}")
        found = tuple(self.files.describe(self.cache / name) for name in names)
        node = {"compiled": 1, "failed": 0, "graphs": 1, "seconds": seconds, "files": found}
        hosts = range(facts["ingredients"]["nodes"])
        nodes = tuple(NodeResult(node=n, host=f"node-{n}", **node) for n in hosts)
        made = {"by": "ada", "run": f"/runs/{run}"}
        parts = {name: facts[name] for name in ("key", "ingredients", "versions")}
        self.files.write(GraphManifest(**parts, made=made, nodes=nodes))
        return key


@pytest.fixture
def graphs(site: Site, tmp_path: Path) -> Graphs:
    """The compile cache of the cluster `pc`, whose Python is here; and the recipe `toy`."""
    graphs = Graphs(site, tmp_path)
    graphs.profile()
    site.recipe()
    return graphs


def write_attempt(run: RunDir, phase: str, number: int, **fields: Any) -> None:
    """Write the state file of one attempt."""
    attempt = Attempt(**{"phase": phase, "attempt": number, "hosts": "node-1,node-2"} | fields)
    write_json(run.state / f"{phase}-{number}.json", vars(attempt))
