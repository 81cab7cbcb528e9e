"""neuron-image.sh: what goes into the image, in which order; apt and modinfo are stand-ins."""

import os
from pathlib import Path

import pytest

from trnslurm.config.software import NEURON_SDKS

from ..processes import Done, run_process

SCRIPT = Path(__file__).resolve().parents[2] / "cluster-config/parallelcluster/neuron-image.sh"
STAND_IN = """#!/bin/bash
name=${0##*/}
echo "$name $*" >> "$TRNSLURM_ROOT/calls"
case "$name $*" in
    "uname -r") echo 6.8.0-1021-aws ;;
    modinfo*) [[ " $HAS " == *" ${*: -1} "* ]] ;;
    apt-cache*) printf 'x:\\n  Candidate: %s\\n' "$CANDIDATE" ;;
esac
"""


def run(
    root: Path, has: str, candidate: str = "(none)", script: Path = SCRIPT
) -> tuple[Done, list[str]]:
    """Run it in an image where modinfo knows these modules; also return what it called."""
    for directory in ("bin", "etc/apt/sources.list.d"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    (root / "etc/os-release").write_text("ID=ubuntu\nVERSION_CODENAME=noble\n")
    for name in ("uname", "modinfo", "apt-cache", "apt-get", "apt-mark", "curl"):
        (root / "bin" / name).write_text(STAND_IN)
        (root / "bin" / name).chmod(0o755)
    (root / "calls").write_text("")
    done = run_process(
        [script],
        env={
            "PATH": f"{root}/bin{os.pathsep}/usr/bin{os.pathsep}/bin",
            "TRNSLURM_ROOT": str(root),
            "HAS": has,
            "CANDIDATE": candidate,
        },
    )
    return done, (root / "calls").read_text().splitlines()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "it's an image"


def test_lustre_is_looked_at_before_anything_is_installed(root: Path) -> None:
    done, calls = run(root, has="")
    assert done.code == 1
    assert "there is no Lustre client for kernel 6.8.0-1021-aws: take a ParentImage" in done.err
    assert not any(call.startswith(("apt-get", "curl")) for call in calls)
    done, calls = run(root, has="neuron", candidate="2.15.6-1fsx13")
    assert done.code == 0
    assert "apt-get install --yes lustre-client-modules-6.8.0-1021-aws" in calls


@pytest.mark.parametrize("sdk", NEURON_SDKS)
def test_versions_are_those_of_the_release(root: Path, sdk: str) -> None:
    text = SCRIPT.read_text()
    assert "\nsdk=2.29.1 " in text
    root.mkdir()
    script = root / "script"
    script.write_text(text.replace("\nsdk=2.29.1 ", f"\nsdk={sdk} "))
    script.chmod(0o755)
    done, calls = run(root, has="lustre neuron", script=script)
    assert (done.code, done.err) == (0, "")
    [install] = [call for call in calls if "aws-neuronx-dkms=" in call]
    pins = dict(word.split("=") for word in install.split() if "=" in word)
    assert pins == {name: f"{version}*" for name, version in NEURON_SDKS[sdk].apt.items()}
    held = calls[-1].split()
    assert held[:2] == ["apt-mark", "hold"] and {*pins, "linux-image-aws"} <= {*held}
    source = (root / "etc/apt/sources.list.d/neuron.list").read_text()
    assert source.endswith(" https://apt.repos.neuron.amazonaws.com noble main\n")


def test_a_release_without_versions_installs_nothing(root: Path) -> None:
    root.mkdir()
    script = root / "script"
    script.write_text(SCRIPT.read_text().replace("\nsdk=2.29.1 ", "\nsdk=2.33.1 "))
    script.chmod(0o755)
    done, calls = run(root, has="lustre neuron", script=script)
    assert (done.code, calls) == (1, [])
    assert done.err == "error: sdk=2.33.1: add a line with its versions to this script\n"


def test_a_driver_that_was_not_built_fails_the_image(root: Path) -> None:
    done, calls = run(root, has="lustre")
    assert done.code == 1
    assert "aws-neuronx-dkms 2.27.4.0 was not built for kernel 6.8.0-1021-aws" in done.err
    assert not any(call.startswith("apt-mark") for call in calls)
