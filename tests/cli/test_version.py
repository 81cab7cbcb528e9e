"""--version --verbose: what is installed here, and what the jobs of a cluster use."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from trnslurm import __version__
from trnslurm.cluster.installed import PACKAGES

from ..processes import run_process

ROOT = Path(__file__).parents[2]


def test_what_is_installed_here(site, cli) -> None:
    done = cli("--version", "--verbose")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:3] == [
        f"trnslurm {__version__}, {ROOT / 'trnslurm'}",
        f"Python {sys.version.split()[0]}, {sys.executable}",
        "",
    ]
    assert f"submitit {metadata.version('submitit')}" in re.sub(" +", " ", done.out)
    assert not any(line.startswith("torch-neuronx") for line in lines)


def test_what_a_cluster_uses(graphs, cli, stable, tmp_path, monkeypatch) -> None:
    about = tmp_path / "site-packages/acme-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[trnslurm.causes]\nacme = acme:CAUSES\n")
    monkeypatch.syspath_prepend(about.parent)
    found = json.loads(cli("--verbose", "--version", "-c", "pc", "--json").out)
    stable.json("--version", found, free=["packages", "jobs.needs", "jobs.packages"])
    jobs = found["jobs"]
    assert (jobs["device"], jobs["neuron_sdk"], jobs["problem"]) == ("neuron", "2.29.1", "")
    assert jobs["packages"] == {"torch": "2.9.1", "neuronx-cc": "2.26.1"}
    assert jobs["needs"]["neuronx-cc"] == "2.24.8799.0"
    rows = [line.split() for line in cli("--version", "--verbose", "-c", "pc").out.splitlines()]
    assert ["neuronx-cc", "-", "2.26.1", "2.24.8799.0"] in rows

    graphs.profile(python="/shared/none/python")
    said = cli("--version", "--verbose", "-c", "pc").out
    assert ", for Neuron SDK 2.29.1, there is no /shared/none/python on this host\n" in said
    assert "on pc" not in said.partition("\n\n")[2]


def test_the_default_cluster(site, cli, monkeypatch: pytest.MonkeyPatch) -> None:
    site.profile(container={"image": "train:1", "runtime": "podman"})
    monkeypatch.setenv("TRNSLURM_CLUSTER", "pc")
    assert "\njobs on pc: python3 on neuron, in train:1, for" in cli("--version", "--verbose").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--version", "--json"], "--cluster and --json require --version --verbose"),
        (["--json", "runs"], "--json requires --version, or must come after the command"),
        (["-c", "pc", "plan"], "--cluster requires --version, or must come after the command"),
        (["--verbose", "runs"], "--verbose requires --version, or must come after the command"),
    ],
)
def test_options_that_need_it(site, cli, words: list[str], said: str) -> None:
    done = cli(*words)
    assert done.code == 2 and done.error == f"{said} (trnslurm --help)"


def test_nothing_is_imported() -> None:
    program = (
        "import sys\nfrom trnslurm.cli import main\ntry:\n    main(['--version', '--verbose'])\n"
        "finally:\n    print({'torch', 'numpy', 'submitit'} & {*sys.modules})"
    )
    done = run_process([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.ok.splitlines()[-1] == "set()"


def test_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if k not in ("dev", "docs")}
    pins = [*project["dependencies"], *(pin for pins in extras.values() for pin in pins)]
    names = {re.split(r"[\[<>=]", pin)[0] for pin in pins}
    assert {*PACKAGES} == names - {"trnslurm"}
