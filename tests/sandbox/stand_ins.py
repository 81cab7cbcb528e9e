"""A directory in which the stand-ins of the Neuron tools play, and what tests ask them there."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

from trnslurm.sandbox.layout import replace_text

from ..waiting import eventually

SCRIPT = Path(__file__).resolve().parents[2] / "trnslurm/sandbox/neuron_stand_ins.py"
TRN1_32XL = {
    "instance_type": "trn1.32xlarge",
    "devices": 16,
    "cores_per_device": 2,
    "device_gib": 32,
}
NOTICE = "{}: this is a stand-in in a trnslurm sandbox, not a Neuron tool\n"


class Stage:
    """A directory with an awkward name that the stand-ins play in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = directory / 'it\'s a "home"'
        self.started: list[subprocess.Popen[str]] = []
        self.home.mkdir()
        self.play(TRN1_32XL)

    def play(self, instance: object) -> None:
        """Choose the instance."""
        (self.home / "instance.json").write_text(json.dumps(instance))

    def fault(self, tool: str, behaviour: str, host: str = "all") -> None:
        """Choose a behaviour."""
        (self.home / host).mkdir(exist_ok=True)
        replace_text(self.home / host / tool, f" {behaviour}\n")

    def start(self, *arguments: str, **environ: str) -> "subprocess.Popen[str]":
        """Start a stand-in."""
        process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT), "--home", str(self.home), *arguments],
            cwd=self.directory,
            env=os.environ
            | {"USER": "ada", "NEURON_COMPILE_CACHE_URL": f"{self.directory}/cache"}
            | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, **environ: str) -> tuple[int, str, str]:
        """Run a stand-in to its end; exit code, stdout, and stderr without the notice."""
        process = self.start(*arguments, **environ)
        out, err = process.communicate(timeout=600)
        notice = NOTICE.format(arguments[0])
        assert err.startswith(notice)
        return process.returncode, out, err.removeprefix(notice)

    def await_file(self, name: str) -> str:
        """Wait for a file that appears whole."""
        eventually((self.directory / name).exists)
        return (self.directory / name).read_text()


def assert_waits(process):
    """It neither ends nor prints for a while."""
    readable, _, _ = select.select([process.stdout], [], [], 0.2)
    assert not readable
    assert process.poll() is None
