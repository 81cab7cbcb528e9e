"""env check: a node's Python, started as the batch script would, compared with the pins."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from trnslurm.config import software
from trnslurm.devices import CUDA, NEURON, TORCHNEURON, XLA_CPU

GOOD = {
    "torch": "2.9.1+cpu", "transformers": "4.57.6", "accelerate": "1.15.0", "torch-xla": "2.9.0",
    "torch-neuronx": "2.9.0.2.13.26312+8e870898", "neuronx-cc": "2.24.8799.0+6f62ff7c",
    "libneuronxla": "2.2.16408.0+50c26cbd",
}  # fmt: skip
LAST = {
    "torch_neuronx": "2.9.0.2.15.32035+de43f57c", "neuronx_cc": "2.26.6360.0+6f180f47",
    "libneuronxla": "2.2.17544.0+fb9962bf",
}  # fmt: skip
NATIVE = {
    "torch": "2.14.0+cpu", "transformers": "5.24.0", "accelerate": "1.15.0", "torch_xla": None,
    "torch_neuronx": "2.14.3.0.20117", "neuronx_cc": "2.28.7631.0+7ae7c2f1", "nki": "0.7.0",
    "libneuronxla": None,
}  # fmt: skip
SEEN = {"imported": True, "said": GOOD["torch-neuronx"]}


@pytest.fixture
def node(site, fake_slurm, tmp_path: Path):
    """Make the cluster's Python one that answers with these packages."""

    def make(
        python: str = "3.11.9",
        activate: tuple[str, ...] = (),
        compiler: str | None = "/shared/venv/bin/neuronx-cc",
        imported: dict[str, object] | None = None,
        neuron_sdk: str = "2.29.1",
        instance_type: str = "trn1.32xlarge",
        **changes: str | None,
    ) -> Path:
        packages = GOOD | {k.replace("_", "-"): v for k, v in changes.items()}
        commands = {"neuronx-cc": compiler}
        answer = {
            "python": python, "executable": "x", "host": "node-1", "packages": packages,
            "commands": commands, "imports": {"torch_neuronx": imported or SEEN},
        }  # fmt: skip
        program = tmp_path / "the node's python"
        program.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{json.dumps(answer)}'\n")
        program.chmod(0o755)
        slurm = {"partition": "compute", "account": "team", "sbatch": ["--mem=0"]}
        site.profile(
            python=str(program), activate=list(activate), slurm=slurm, neuron_sdk=neuron_sdk,
            instance_type=instance_type,
        )  # fmt: skip
        return program

    return make


@pytest.mark.parametrize(
    ("version", "pin", "match"),
    [
        ("2.9.1+cpu", ">=2.9", True), ("2.14.1+cu130", ">=2.9", True), ("3.0", ">=2.9", True),
        ("2.8.0", ">=2.9", False), (None, ">=2.9", False), ("2.10.0", "2.9", False),
    ],
)  # fmt: skip
def test_only_xla_needs_exact_versions(version: str | None, pin: str, match: bool) -> None:
    assert software.matches(version, pin) == match
    exact = software.packages_for(XLA_CPU, "2.29.1")
    assert software.packages_for(CUDA, "2.29.1").keys() == exact.keys() - {"torch-xla"}
    assert exact["torch"] == "2.9"


def test_good_environment(node, fake_slurm, cli) -> None:
    node()
    done = cli("env", "check", "--cluster", "pc")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("node-1: Python 3.11.9, x, for Neuron SDK 2.29.1\n")
    (call,) = fake_slurm.calls("srun")
    assert call.arguments == [
        "--nodes=1", "--ntasks=1", "--time=5", "--quiet", "--job-name=trnslurm-env-check",
        "--export=NONE", "--partition=compute", "--account=team", "--mem=0", "/bin/bash", "-s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"torch": "2.8.0"}, "torch is 2.8.0, but jobs need 2.9"),
        ({"torch": "2.90.0"}, "torch is 2.90.0, but jobs need 2.9"),
        ({"torch": None}, "torch is missing, but jobs need 2.9"),
        ({"transformers": "5.0.0"}, "transformers is 5.0.0, but jobs need 4.57"),
        (
            {"neuronx_cc": "2.24.87990.0"},
            "neuronx-cc is 2.24.87990.0, but jobs need 2.24.8799.0",
        ),
        ({"libneuronxla": "2.2.17544.0"}, "libneuronxla is 2.2.17544.0"),
        ({"libneuronxla": None}, "libneuronxla is missing, but jobs need 2.2.16408.0"),
        ({"compiler": None}, "neuronx-cc is not on PATH"),
        ({"python": "3.10.2"}, "Python is 3.10.2, but recipes need 3.11 and custom scripts 3.9"),
        ({"python": "3.13.1"}, "Python is 3.13.1, but Neuron SDK 2.29.1 has packages for 3.11"),
        (
            {"imported": {"imported": False, "said": "ImportError: libnrt.so.1: no such file"}},
            "import torch_neuronx fails: ImportError: libnrt.so.1: no such file",
        ),
        (
            {"imported": {"imported": True, "said": "2.9.0.2.15.32035"}},
            "torch_neuronx has version 2.9.0.2.15.32035, but its package "
            "2.9.0.2.13.26312+8e870898: ",
        ),
    ],
)
def test_problem(node, cli, changes: dict[str, str | None], problem: str, stable) -> None:
    node(**changes)
    done = cli("env", "check", "--cluster", "pc")
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: {problem}")
    assert ";" not in line  # the one problem, no other
    report = cli("env", "check", "--cluster", "pc", "--json")
    assert report.code == 1
    stable.json("env check", json.loads(report.out), free=["packages", "imports", "commands"])
    assert len(json.loads(report.out)["problems"]) == 1


def test_each_release_is_checked_whole(node, cli) -> None:
    seen = {"imported": True, "said": LAST["torch_neuronx"]}
    node(imported=seen, neuron_sdk="2.31.1", python="3.13.1", **LAST)
    done = cli("env", "check", "--cluster", "pc")
    assert (done.code, done.err) == (0, "")
    node(imported=seen, **LAST)
    assert cli("env", "check", "--cluster", "pc").err.startswith(
        "error: its packages belong to Neuron SDK 2.31.1, but the profile says 2.29.1: set "
        "neuron_sdk: 2.31.1, or install the packages of 2.29.1; torch-neuronx is 2.9.0.2.15.32035"
    )
    trn2 = {"neuron_sdk": "2.33.0", "instance_type": "trn2.48xlarge"}
    node(imported={"imported": True, "said": ""}, python="3.12.3", **trn2, **NATIVE)
    done = cli("env", "check", "--cluster", "pc")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("node-1: Python 3.12.3, x, for Neuron SDK 2.33.0\n")
    node(**trn2)
    done = cli("env", "check", "--cluster", "pc")
    for words in ("torch is 2.9.1+cpu, but jobs need 2.14", "nki is missing",
                  "its packages belong to Neuron SDK 2.29.1, but the profile says 2.33.0",
                  "but Neuron SDK 2.33.0 has packages for 3.12 to 3.14"):  # fmt: skip
        assert words in done.err
    for wrong in ("2.30.0", "2.33", "9"):
        node(neuron_sdk=wrong)
        done = cli("env", "check", "--cluster", "pc")
        assert f"neuron_sdk is '{wrong}': it must be 2.29.1, 2.31.1, 2.33.0 or a" in done.error


def test_a_later_release_has_at_least_the_versions_of_the_newest(node, cli) -> None:
    trn2 = {"neuron_sdk": "2.33.1", "instance_type": "trn2.48xlarge", "python": "3.15.0"}
    seen = {"imported": True, "said": ""}
    for nki in ("0.7.0", "0.7.1"):
        node(imported=seen, **trn2, **NATIVE | {"nki": nki})
        done = cli("env", "check", "--cluster", "pc")
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith("node-1: Python 3.15.0, x, for Neuron SDK 2.33.1\n")
    node(imported=seen, **trn2, **NATIVE | {"neuronx_cc": "2.26.6360.0"})
    assert cli("env", "check", "--cluster", "pc").err == (
        "error: neuronx-cc is 2.26.6360.0, but jobs need >=2.28.7631.0\n"
    )


def test_the_real_probe_imports_what_is_installed(site, monkeypatch, tmp_path: Path, cli) -> None:
    """Imported for real, in a process of its own: one that dies is told as such."""
    module = tmp_path / "lib/torch_neuronx.py"
    for said, lines in {
        "has version 2.9.0, but its package 2.9.0.2.13.26312: two": "__version__ = '2.9.0'",
        "import torch_neuronx fails: OSError: libnrt.so.1: cannot": (
            "raise OSError('libnrt.so.1: cannot open shared object file')"
        ),
        "import torch_neuronx fails: exit code -9": "import os; os.kill(os.getpid(), 9)",
    }.items():
        package = tmp_path / "lib/torch_neuronx-2.9.0.2.13.26312.dist-info"
        package.mkdir(parents=True, exist_ok=True)
        (package / "METADATA").write_text("Name: torch-neuronx\nVersion: 2.9.0.2.13.26312\n")
        module.write_text(lines + "\n")
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/sh\nexport PYTHONPATH="$(dirname "$0")/lib"\nexec \'{sys.executable}\' "$@"\n'
        )
        python.chmod(0o755)
        site.profile("here", scheduler="local", instance_type="trn1.2xlarge", python=str(python))
        assert said in cli("env", "check", "--cluster", "here").err


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
    assert "the node's Python (" in done.error and "module" in done.error


def test_no_python_there(site, fake_slurm, cli) -> None:
    done = cli("env", "check", "--cluster", "pc")
    assert done.code == 1
    assert "/shared/venv/bin/python" in done.error
    assert "No such file or directory" in done.error


def test_python_that_answers_nothing(site, fake_slurm, cli, tmp_path: Path) -> None:
    site.profile(python="/bin/true")
    done = cli("env", "check", "--cluster", "pc")
    assert done.code == 1
    assert done.error == "/bin/true on the node did not print an answer"
    warns = tmp_path / "python"
    warns.write_text("#!/bin/sh\necho 'srun: error: Invalid argument' >&2\n")
    warns.chmod(0o755)
    site.profile(python=str(warns))
    done = cli("env", "check", "--cluster", "pc")
    assert done.error.endswith(
        "python on the node did not print an answer: srun: error: Invalid argument"
    )


def test_no_node_comes(node, fake_slurm, cli) -> None:
    node()
    fake_slurm.hang("srun")
    done = cli("env", "check", "--cluster", "pc", "--timeout", "0.5")
    assert done.code == 1
    assert done.error.startswith("no node answered within 0.5 s")


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
    for sdk, extra in {"2.29.1": "neuron", "2.31.1": "neuron-2-31"}.items():
        ours = software.packages_for(NEURON, sdk)
        exact = [word.partition("==") for word in (*extras["train"], *extras[extra])]
        for name, _, version in exact:
            assert not version or software.matches(version, ours[name]), name
        pins = {name: version for name, _, version in exact if "neuron" in name}
        assert pins == software.NEURON_SDKS[sdk].pip
    native = [word.partition(";")[0].partition("==") for word in extras["torchneuron"]]
    pins = {name: version.removesuffix(".*") for name, _, version in native if version}
    ours = software.packages_for(TORCHNEURON, "2.33.0")
    assert pins == {name: version for name, version in ours.items() if ">" not in version}
