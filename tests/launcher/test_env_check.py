"""env check: a node's Python, started as the batch script would, compared with the pins."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from trnslurm.cluster import execute

GOOD = {
    "torch": "2.9.1+cpu", "transformers": "4.57.6", "accelerate": "1.15.0", "torch-xla": "2.9.0",
    "torch-neuronx": "2.9.0.2.15.32035", "neuronx-cc": "2.26.6360",
}  # fmt: skip


@pytest.fixture
def node(site, fake_slurm, tmp_path: Path):
    """Make the cluster's Python one that answers with these packages."""

    def make(
        python: str = "3.11.9",
        activate: tuple[str, ...] = (),
        compiler: str | None = "/shared/venv/bin/neuronx-cc",
        **changes: str | None,
    ) -> Path:
        packages = GOOD | {k.replace("_", "-"): v for k, v in changes.items()}
        commands = {"neuronx-cc": compiler}
        answer = {
            "python": python, "executable": "x", "host": "node-1", "packages": packages,
            "commands": commands,
        }  # fmt: skip
        program = tmp_path / "the node's python"
        program.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{json.dumps(answer)}'\n")
        program.chmod(0o755)
        slurm = {"partition": "compute", "account": "team", "sbatch": ["--mem=0"]}
        site.profile(python=str(program), activate=list(activate), slurm=slurm)
        return program

    return make


def test_good_environment(node, fake_slurm, cli) -> None:
    node()
    done = cli("env", "check", "--cluster", "pc")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("node-1: Python 3.11.9")
    (call,) = fake_slurm.calls("srun")
    assert call.arguments == [
        "--nodes=1", "--ntasks=1", "--time=5", "--quiet", "--job-name=trnslurm-env-check",
        "--export=NONE", "--partition=compute", "--account=team", "--mem=0", "/bin/bash", "-s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"torch": "2.8.0"}, "torch is 2.8.0, the jobs are made for 2.9"),
        ({"torch": "2.90.0"}, "torch is 2.90.0, the jobs are made for 2.9"),
        ({"torch": None}, "torch is missing, the jobs are made for 2.9"),
        ({"transformers": "5.0.0"}, "transformers is 5.0.0, the jobs are made for 4.57"),
        ({"neuronx_cc": "2.26.6361"}, "neuronx-cc is 2.26.6361, the jobs are made for 2.26.6360"),
        ({"torch_neuronx": "2.9.0.2.15"}, "torch-neuronx is 2.9.0.2.15"),
        ({"compiler": None}, "neuronx-cc is not on PATH"),
        ({"python": "3.10.2"}, "Python is 3.10.2, the jobs need 3.11"),
    ],
)
def test_problem(node, cli, changes: dict[str, str | None], problem: str) -> None:
    node(**changes)
    done = cli("env", "check", "--cluster", "pc")
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: {problem}")
    assert ";" not in line  # the one problem, no other
    report = cli("env", "check", "--cluster", "pc", "--json")
    assert report.code == 1
    assert len(json.loads(report.out)["problems"]) == 1


def test_all_problems_are_told_at_once(node, cli) -> None:
    node(torch=None, transformers=None)
    (line,) = cli("env", "check", "--cluster", "pc").err.splitlines()
    assert "torch is missing" in line and "transformers is missing" in line


def test_activation_lines_come_first(node, cli, tmp_path: Path) -> None:
    node(activate=(f"echo loaded > '{tmp_path}/loaded'",))
    assert cli("env", "check", "--cluster", "pc").code == 0
    assert (tmp_path / "loaded").read_text() == "loaded\n"
    node(activate=("module load absent",))
    done = cli("env", "check", "--cluster", "pc")
    assert done.code == 1
    assert "the node's Python did not run" in done.error and "module" in done.error


def test_no_python_there(site, fake_slurm, cli) -> None:
    done = cli("env", "check", "--cluster", "pc")
    assert done.code == 1
    assert "/shared/venv/bin/python" in done.error
    assert "No such file or directory" in done.error


def test_python_that_answers_nothing(site, fake_slurm, cli) -> None:
    site.profile(python="/bin/true")
    done = cli("env", "check", "--cluster", "pc")
    assert done.code == 1
    assert done.error == "/bin/true on the node printed no answer"


def test_no_node_comes(node, fake_slurm, cli) -> None:
    node()
    fake_slurm.hang("srun")
    done = cli("env", "check", "--cluster", "pc", "--timeout", "0.5")
    assert done.code == 1
    assert done.error.startswith("no node answered in 0.5 s")


def test_without_srun(site, cli) -> None:
    done = cli("env", "check", "--cluster", "pc")
    assert done.code == 1
    assert done.error.startswith("srun not found")


def test_local_needs_no_slurm(site, cli) -> None:
    site.profile("here", scheduler="local", instance_type="local", device="cpu", python="python3")
    report = json.loads(cli("env", "check", "--cluster", "here", "--json").out)
    assert set(report["packages"]) == {"torch", "transformers", "accelerate"}


def test_pins_are_those_of_the_package() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    ours = execute._PINS
    for pins in execute._PINS_OF_DEVICE.values():
        ours = ours | pins
    for word in (*extras["train"], *extras["neuron"]):
        name, _, version = word.partition("==")
        if version:
            assert execute.matches(version, ours[name]), word
