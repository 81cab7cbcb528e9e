"""What was where an attempt failed decides between causes: packages, devices, limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trnslurm.contract.files import write_json
from trnslurm.node.packages import packages
from trnslurm.node.triage import diagnosis
from trnslurm.node.triage.again import runs_same_python
from trnslurm.node.triage.finding import Finding
from trnslurm.node.usage.machine import machine
from trnslurm.records.run import RunDir

FAILED = {"state": "FAILED", "exit_code": 1, "reason": "exit code 1"}
IMPORT = """\
Traceback (most recent call last):
  File "/home/ada/train.py", line 1, in <module>
    from transformers import Trainer
  File "{site}/transformers/trainer.py", line 7, in <module>
    from accelerate.utils import clear_cache
ImportError: cannot import name 'clear_cache' from 'accelerate.utils' ({site}/accelerate/utils.py)
"""
METADATA = {
    "transformers": "Provides-Extra: torch\nProvides-Extra: dev-torch\n"
    'Requires-Dist: accelerate>=0.26; extra == "torch"\n'
    'Requires-Dist: PyYAML==5.1; extra == "dev-torch"\nRequires-Dist: pyyaml>=5\n',
    "accelerate": 'Requires-Dist: pyyaml<2; python_version < "3"\n',
    "pyyaml": "",
}


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with packages that do not fit together, first on Python's path."""
    place = tmp_path / "site-packages"
    for name, more in METADATA.items():
        version = {"transformers": "4.57.6", "accelerate": "0.21.0", "pyyaml": "6.0"}[name]
        info = place / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(f"Name: {name}\nVersion: {version}\n{more}\n")
    (place / "pyyaml-6.0.dist-info/top_level.txt").write_text("_yaml\nyaml\n")
    monkeypatch.syspath_prepend(str(place))
    return place


@pytest.fixture
def diagnose(make_run: Callable[..., RunDir]) -> Callable[..., Finding]:
    """Returns the diagnosis of a log, with what the node has noted."""
    run = make_run(states={"train": [FAILED]}, phases=("train",), jobs={"train": "1002"})

    def diagnose(log: str, packages: Any = None, machine: Any = None, used: Any = None) -> Finding:
        run.node_log("train", 1, 0).write_text(log)
        write_json(run.packages_file("train", 1), packages or {})
        write_json(run.machine_file("train", 1, 0), machine or {})
        if used:
            run.usage_file(0).parent.mkdir(exist_ok=True)
            run.usage_file(0).write_text(json.dumps(used) + "\n")
        found = diagnosis.diagnose(run.path, "train", 1)
        assert found
        return found

    return diagnose


def test_packages_and_what_they_ask_of_each_other(site_packages: Path) -> None:
    told = packages(["accelerate", "yaml", "transformers", "nowhere"])
    assert told["packages"] == {
        "accelerate": ["accelerate", "0.21.0"],
        "yaml": ["pyyaml", "6.0"],
        "transformers": ["transformers", "4.57.6"],
    }
    assert told["asks"] == [
        ("transformers", "accelerate", "accelerate>=0.26", False),
        ("transformers", "pyyaml", "pyyaml>=5", True),
    ]
    assert told["places"] == [str(site_packages)]


def test_a_package_that_asks_for_another_version_is_the_cause(
    site_packages: Path, diagnose: Callable[..., Finding]
) -> None:
    log = IMPORT.format(site=site_packages)
    before = diagnose(log)
    assert before.modules == ("accelerate", "transformers")
    found = diagnose(log, packages(before.modules))
    assert found.certain and found.mend == "resume"
    asked = "transformers 4.57.6 requires accelerate>=0.26, but accelerate 0.21.0 is installed"
    assert found.cause == asked and found.brief.endswith(asked)
    assert "pip install 'accelerate>=0.26'" in found.fix
    assert (
        diagnose(IMPORT.format(site="/opt/other/site-packages"), packages(before.modules)).cause
        == before.cause
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda facts: facts | {"asks": [["transformers", "accelerate"]]},
        lambda facts: facts | {"packages": {"accelerate": "0.21.0"}},
        lambda facts: facts | {"places": 7},
        lambda facts: facts | {"packages": [], "asks": {}},
        lambda facts: {},
    ],
)
def test_a_damaged_file_tells_nothing(
    site_packages: Path, diagnose: Callable[..., Finding], damage: Callable[[Any], Any]
) -> None:
    log = IMPORT.format(site=site_packages)
    facts = json.loads(json.dumps(packages(["accelerate", "transformers"])))
    assert diagnose(log, damage(facts)).report() == diagnose(log).report()


def test_versions_that_fit_are_told(
    tmp_path: Path, site_packages: Path, diagnose: Callable[..., Finding]
) -> None:
    """The caller's file is asked from which package it has the class that the exception names."""
    script, caller = tmp_path / "train.py", site_packages / "transformers/trainer.py"
    caller.parent.mkdir()
    script.write_text("from transformers import (\n    Trainer,\n    TrainingArguments,\n)\n")
    caller.write_text("if True:\n    from accelerate import Accelerator\n")
    log = (
        f'Traceback (most recent call last):\n  File "{script}", line 9, in <module>\n'
        "    Trainer(tokenizer=1)\n"
    )
    error = "TypeError: {}.__init__() got an unexpected keyword argument 'tokenizer'\n"
    own = log + error.format("Trainer")
    found = diagnose(own, packages(diagnose(own).modules))
    assert found.there == "installed: transformers 4.57.6"
    assert found.there in found.report()
    called = f'{log}  File "{caller}", line 3, in __init__\n    Accelerator(tokenizer=1)\n'
    assert diagnose(called + error.format("Accelerator")).modules == ("transformers", "accelerate")


CALLS = """\
Traceback (most recent call last):
  File "{project}/train.py", line 1, in <module>
    Trainer()
  File "{site}/{caller}/trainer.py", line 7, in __init__
    self.accelerator = Accelerator(dispatch_batches=None)
"""
NO_ARGUMENT = (
    "TypeError: Accelerator.__init__() got an unexpected keyword argument 'dispatch_batches'"
)
NO_NAME = (
    "ImportError: cannot import name 'clear_cache' from 'accelerate.utils' ({site}/accelerate.py)"
)
NO_ATTRIBUTE = "AttributeError: module 'accelerate.utils' has no attribute 'clear_cache'"


@pytest.mark.parametrize(
    ("user", "other", "line", "says"),
    [
        ("4.32.0", "1.0.1", NO_ARGUMENT, "too new: 'accelerate==0.21.0' or 'transformers>=4.45.0'"),
        ("4.32.0+cu128", "1.0.1.post1", NO_NAME, "too new: "),
        ("4.32.0", "99.1", NO_NAME, "too new: "),  # newer than what is listed
        (
            "4.46.1",
            "0.24.1",
            NO_ATTRIBUTE,
            "too old: 'accelerate>=1.0.0' or 'transformers==4.34.0'",
        ),
        ("4.46.0.dev0", "0.24.1", NO_NAME, ""),
        ("98.1", "99.1", NO_NAME, ""),
        ("", "1.0.1", NO_NAME, ""),
        ("4.32.0", "1.0.1", NO_NAME.replace("({site}/accelerate.py)", "(unknown location)"), ""),
        ("4.32.0", "1.0.1", NO_NAME.replace("'accelerate", "partially initialized module 'a"), ""),
        ("4.32.0", "1.0.1", NO_ATTRIBUTE.replace("module", "partially initialized module"), ""),
    ],
)
def test_the_older_of_two_packages_is_named(
    tmp_path: Path, diagnose: Callable[..., Finding], user: str, other: str, line: str, says: str
) -> None:
    site, project = tmp_path / "site-packages", tmp_path / "project"
    for caller in ("transformers", "wrapper"):
        (site / caller).mkdir(parents=True)
    project.mkdir()
    (site / "transformers/trainer.py").write_text("from accelerate import Accelerator\n")
    met = {"transformers": ["transformers", user], "accelerate": ["accelerate", other]}
    facts = {"packages": met, "places": [str(site)], "asks": []}
    log = (CALLS + line).format(site=site, project=project, caller="transformers")
    found, before = diagnose(log, facts), diagnose(log)
    if not says:
        assert found.cause == before.cause
        return
    too, ways = says.split(": ")
    assert f"accelerate {other} is {too} for transformers {user}" in found.cause
    assert found.certain and found.mend == "resume" and f"pip install {ways}" in found.fix
    (project / "accelerate.py").touch()  # hides the package
    assert diagnose(log, facts).cause == before.cause


def test_a_wrapper_is_not_the_one_that_calls(
    tmp_path: Path, diagnose: Callable[..., Finding]
) -> None:
    """huggingface_hub's decorators call trl's classes, and import nothing of trl."""
    site, script = tmp_path / "site-packages", tmp_path / "train.py"
    (site / "wrapper").mkdir(parents=True)
    (site / "wrapper/trainer.py").write_text("import functools\n")
    script.write_text("from accelerate import Accelerator\n")
    met = {"wrapper": ["transformers", "4.32.0"], "accelerate": ["accelerate", "1.0.1"]}
    log = (CALLS + NO_ARGUMENT).format(site=site, project=tmp_path, caller="wrapper")
    found = diagnose(log, {"packages": met, "places": [str(site)], "asks": []})
    assert set(found.modules) == {"wrapper", "accelerate"} and "installed: " in found.there


HAS = {
    "gpus": 8,
    "gpus_there": 8,
    "driver": "550.54.15",
    "torch": {"__version__": "2.9.1", "cuda": "12.8", "hip": ""},
}
LOCKED = "NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory"
NO_GPU = (
    "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
)


@pytest.mark.parametrize(
    ("has", "says"),
    [
        ({"torch": {"__version__": "2.9.1+cpu", "cuda": "", "hip": ""}}, "built for CPUs"),
        ({"driver": "470.82.01"}, "CUDA 12.8 needs 525 or newer"),
        ({"gpus": 0}, "none of this node's 8 GPUs"),
        ({"torch": {"__version__": 3}}, ""),
        ({}, ""),
    ],
)
def test_why_there_is_no_gpu(
    diagnose: Callable[..., Finding], has: Mapping[str, object], says: str
) -> None:
    found, before = diagnose(NO_GPU, machine=HAS | has), diagnose(NO_GPU)
    assert says in found.cause and bool(says) == (found.cause != before.cause)
    told = "on node 0: GPUs 8, driver 550.54.15, torch 2.9.1 for CUDA 12.8"
    assert found.there == (told if not has else found.there)


def test_a_run_on_cpus_is_told_how_to_do_without_a_gpu(
    tmp_path: Path, diagnose: Callable[..., Finding]
) -> None:
    """Not to install PyTorch for CUDA, though its PyTorch is built for CPUs."""
    run = RunDir(next((tmp_path / "runs").iterdir()))
    write_json(run.plan_file, {**json.loads(run.plan_file.read_text()), "device": "cpu"})
    built = {"torch": {"__version__": "2.9.1+cpu", "cuda": "", "hip": ""}}
    found = diagnose("ValueError: Your setup doesn't support bf16/gpu.", machine=HAS | built)
    assert found.cause == "the script needs a GPU, but this run computes on CPUs"
    assert "--use_cpu" in found.fix


@pytest.mark.parametrize(
    ("line", "has", "says"),
    [
        (
            "OSError: [Errno 28] No space left on device",
            {},
            "GiB free: run directory 0.0, temporary directory 7.2",
        ),
        (
            "RuntimeError: unable to write to file </torch_12_3>: Bus error. /dev/shm",
            {"shm_gib": 0.0625},
            "/dev/shm 0.1 GiB (0.0 free)",
        ),
        ("OSError: [Errno 24] Too many open files", {"open_files": 1024}, "open files 1024"),
        (LOCKED, {"memlock_kib": None}, "memlock unlimited"),
        (LOCKED, {"memlock_kib": 64}, "memlock 64 KiB"),
    ],
)
def test_what_the_node_has_is_told(
    diagnose: Callable[..., Finding], line: str, has: Mapping[str, object], says: str
) -> None:
    used = {"phase": "train", "attempt": 1, "run_left_gib": 0.01, "tmp_left_gib": 7.2}
    assert says in diagnose(line, machine=has, used=used | {"shm_left_gib": 0.0}).there
    assert diagnose(line, machine={}, used=used | {"attempt": 2}).there == ""


@pytest.mark.parametrize(
    ("started", "script", "same"),
    [
        ('TRNSLURM_COMMAND=(\n  "$TRNSLURM_PYTHON" -m trnslurm.node.torchrun', "", True),
        ('TRNSLURM_COMMAND=(./run.sh)\n  TRNSLURM_COMMAND=("$TRNSLURM_PYTHON"', "", False),
        ('TRNSLURM_COMMAND=("$TRNSLURM_PYTHON" train.py)', "# preparing the container", False),
    ],
)
def test_packages_are_asked_of_the_python_that_failed(
    make_run: Callable[..., RunDir], started: str, script: str, same: bool
) -> None:
    run = make_run(states={"train": [FAILED]}, phases=("train",), jobs={"train": "1002"})
    (run.path / "node.sh").write_text(started)
    run.script("train").write_text(script)
    assert runs_same_python(run.path, "train") == same


def test_a_node_tells_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "neuron0", "neuron_x"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "dev/nvidia2").mkdir()  # which cannot be opened
    driver = tmp_path / "proc/driver/nvidia/version"
    driver.parent.mkdir(parents=True)
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.172.08  Release"
    )
    network = tmp_path / "sys/class/infiniband"
    for name, module in (("rdmap16s27", "efa"), ("mlx5_0", "mlx5_core")):
        (network / name / "device").mkdir(parents=True)
        (tmp_path / "sys/drivers" / module).mkdir(parents=True)
        (network / name / "device/driver").symlink_to(tmp_path / "sys/drivers" / module)
    told = machine(tmp_path)
    assert (told["gpus"], told["gpus_there"], told["neuron_devices"]) == (2, 3, 1)
    assert (told["efa_devices"], told["driver"]) == (1, "570.172.08")
    assert told["shm_gib"] > 0 and told["open_files"] > 0
    assert re.match(r"2\.\d", told["torch"]["__version__"])
    assert "gpus" in machine() and machine(tmp_path / "nothing")["gpus_there"] == 0
