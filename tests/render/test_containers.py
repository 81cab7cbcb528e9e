"""Containers: what is refused or warned of before anything is queued, and what is not looked at."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

TOY = ("toy", "--cluster", "pc", "--nodes", "2")
SUBMIT = ("submit", *TOY, "--time", "60")
IMAGE = ("--set", "container.image=team/image:1")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("container.image=./mine.sqsh", "it must be a name, a URI, or a file's absolute path"),
        ("container.image=two words", "it must be a name, a URI, or a file's absolute path"),
        ("container.image=--privileged", "it must be a name, a URI, or a file's absolute path"),
        ("container.runtime=docker", "expected one of pyxis, apptainer, podman"),
        ("container.mounts=[data]", "'data' must be HOST, HOST:INSIDE or HOST:INSIDE:ro"),
        ("container.mounts=['/a:b']", "'/a:b' must be HOST"),
        ("container.mounts=['/a,/etc:/b']", "'/a,/etc:/b' must be HOST"),
        ("container.mounts=['/a:/b:rw,z']", "'/a:/b:rw,z' must be HOST"),
        ("container.mounts=['/a b']", "'/a b' must be HOST"),
        ("container.mounts=['/a$(b)']", "'/a$(b)' must be HOST"),
        ("container.image=mine.sqsh", "it must be a name, a URI, or a file's absolute path"),
        ("container.image=$(mine)", "it must be a name, a URI, or a file's absolute path"),
        ("slurm.sbatch=[--container-image=x]", "the batch script itself would run in the image"),
        ("slurm.srun=[--container-image=x]", "the template sets this option itself"),
        ("slurm.srun=[--nodel=a]", "slurm.srun: --nodel=a: the template sets this option itself"),
        ("slurm.srun=[-N1]", "slurm.srun: '-N1': expected one long option, such as --mpi=none"),
        ("slurm.srun=[--auto-resume=1]", "HyperPod replaces faulty nodes without this option"),
        ("container.workdir=src", "container.workdir is 'src': it must be an absolute path"),
        ("container.python=", "container.python is empty"),
        ("container.python=-c", "container.python is '-c': it must be a path"),
        ("container.imgae=x", 'unknown key container.imgae (did you mean "container.image"?)'),
        ("run_root=/fsx/my runs", "run_root is '/fsx/my runs': a container can mount only "),
        ("data_root=/fsx/a:b", "data_root is '/fsx/a:b': a container can mount only absolute "),
        ("train.init_from=/fsx/a,b", "'/fsx/a,b': a container can mount only"),
        ("compile_cache=null", "is lost with the container: set it to a directory that all nodes"),
    ],
)
def test_refused(graphs, site, fake_slurm, cli, setting: str, words: str) -> None:
    site.recipe("batch: {global_batch: 256}\ntrain: {init_from: ''}\ndata: {path: ''}\n")
    done = cli(*SUBMIT, *IMAGE, "--set", setting)
    assert done.code == 1
    assert words in done.err.splitlines()[-1]
    assert fake_slurm.calls("sbatch") == [] and site.runs() == []


def test_the_images_packages_are_not_known_here(graphs, fake_slurm, cli) -> None:
    graphs.profile(python="/nowhere/python", slurm={"partition": "c"})
    done = cli("compile", "key", *TOY, *IMAGE)
    assert "the packages are in the image team/image:1" in done.err
    done = cli(*SUBMIT, *IMAGE, "--dry-run")
    assert done.code == 0
    assert "known only on the cluster (the packages are in the image team/image:1)" in done.out
    assert (
        "warning: srun on this host has no option --container-image: the nodes need pyxis"
        in done.err
    )


def test_what_this_host_sees(graphs, fake_slurm, cli, tmp_path: Path) -> None:
    def said(*sets: str) -> str:
        words = [word for setting in sets for word in ("--set", setting)]
        return str(cli(*SUBMIT, "--dry-run", *words).err)

    here = tmp_path / "image.sqsh"
    missing = f"error: container.image: {here} does not exist"
    assert missing in said(f"container.image={here}")
    here.touch()
    assert missing not in said(f"container.image={here}")
    elsewhere = said("container.image=/nowhere/image.sqsh")
    assert (
        "warning: container.image: /nowhere/image.sqsh does not exist on this host, " in elsewhere
    )
    podman = ("container.image=x", "container.runtime=podman")
    fake_slurm.answer("show-config", "ProctrackType           = proctrack/linuxproc")
    assert "warning: Slurm uses proctrack/linuxproc, which misses Podman's" in said(*podman)
    fake_slurm.answer("show-config", "ProctrackType           = proctrack/cgroup")
    assert "Podman" not in said(*podman)


def test_this_machine(site, cli, monkeypatch, tmp_path: Path) -> None:
    words = ("submit", "gpt2_zero1", "--cluster", "local", "--preset", "tiny", "--dry-run", *IMAGE)
    assert "pyxis, which is a plugin for Slurm's srun: on the local" in cli(*words).error
    for command in ("bash", "git"):
        (tmp_path / command).symlink_to(str(shutil.which(command)))
    monkeypatch.setenv("PATH", str(tmp_path))
    error = cli(*words, "--set", "container.runtime=podman").error
    assert error == "container.runtime is podman, which is missing on this machine: install it"
    (tmp_path / "podman").symlink_to("/bin/true")
    assert cli(*words, "--set", "container.runtime=podman").code == 0


def test_a_directory_of_the_image_has_no_checkpoints(site, cli, tmp_path: Path) -> None:
    site.profile()
    (tmp_path / "train.py").touch()
    words = ("plan", str(tmp_path / "train.py"), "--cluster", "pc", "--set", "checkpoints=out")
    error = cli(*words, "--set", "container.workdir=/workspace").error
    assert error.startswith("container.workdir is set, so checkpoints would be a directory in the")


PODMAN = """#!/bin/sh
while [ "$1" != env ] && [ "$1" != bash ]; do
  echo "$1" >> "$0.words"
  shift
done
exec "$@"
"""


@pytest.mark.parametrize("runtime", ["podman", "pyxis"])
def test_env_check_asks_the_images_python(
    site, fake_slurm, cli, monkeypatch, tmp_path: Path, runtime: str
) -> None:
    """By stand-ins that start it here."""
    python, podman = tmp_path / "pythön", tmp_path / "podman"
    answer = {"python": "3.12.1", "executable": "/x", "host": "n", "packages": {}, "commands": {}}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    podman.write_text(PODMAN)
    for program in (python, podman):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    container = {"image": "it's:1", "runtime": runtime, "python": str(python), "mounts": ["/fsx"]}
    site.profile(container=container, activate=[f"export PATH='{tmp_path}':$PATH"])
    done = cli("env", "check", "--cluster", "pc")
    assert done.out.startswith("n: Python 3.12.1, /x")
    (call,) = fake_slurm.calls("srun")
    if runtime == "podman":
        assert "it's:1" in (tmp_path / "podman.words").read_text().splitlines()
        return
    assert call.arguments[-5:] == [
        "--container-image=it's:1", "--container-workdir=/tmp",
        "--container-mounts=/tmp:/tmp,/fsx:/fsx", "/bin/bash", "-s",
    ]  # fmt: skip
