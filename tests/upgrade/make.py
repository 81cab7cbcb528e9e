"""Keep a run of this version, to be read by later ones: python -m tests.upgrade.make

It prepares data and trains for a minute, with the profile and recipe of the oldest version kept.
The run's code is kept in code.tar.xz, without the causes of failures, which are most of it; what a
test puts back is left out: the code of the job, and what is empty.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from trnslurm import __version__
from trnslurm.contract.rundir import PACKAGE

HERE = Path(__file__).parent
OLDEST = HERE / "0.1"
TRAIN = ("submit", "mine", "--nodes", "2", "--set", "train.stop_at=4", "--name", "small")
# Compiled graphs, of which the manifest is kept; the profile's device has none.
COMPILE = (*TRAIN[:4], "--set", "device=xla-cpu", "--precompile", "always", "--name", "graphs")


def main() -> None:
    """Make the directory of this version."""
    kept = HERE / ".".join(__version__.split(".")[:2])
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        shutil.copytree(OLDEST / "site", home / "site")
        root = str(HERE.parents[1])
        environ = {"PATH": os.environ["PATH"], "HOME": directory, "PYTHONPATH": root}
        environ |= {"TRNSLURM_CLUSTER": "here", "TRNSLURM_PATH": str(home / "site")}
        for words in (("data", "prepare", "mine", "--processes", "1"), TRAIN, COMPILE):
            command = [sys.executable, "-m", "trnslurm", *words]
            subprocess.run(command, env=environ, cwd=home, check=True)
        (run,) = (home / "runs").glob("*-small")
        (manifest,) = (home / "runs").glob(".compiled/trnslurm/*/manifest.json")
        if kept != OLDEST:
            shutil.copytree(home / "site", kept / "site")
        shutil.copytree(home / "data", kept / "data")
        shutil.copytree(run, kept / "run", ignore=shutil.ignore_patterns("code", "tensorboard"))
        with zipfile.ZipFile(run / PACKAGE) as package:
            package.extractall(run / "code")
        pack(run / "code/trnslurm", kept / "code.tar.xz")
        (kept / "graphs").mkdir()
        shutil.copy(manifest, kept / "graphs")
        for file in [*kept.rglob("*")]:
            if file.is_file():
                prune(file, directory)


def pack(code: Path, archive: Path) -> None:
    """Keep the code of a run; the same files give the same bytes."""
    with tarfile.open(archive, "w:xz", preset=9) as out:
        for file in sorted(code.rglob("*")):
            name = str(file.relative_to(code.parents[1]))
            if file.is_file() and "/triage/known" not in name and "__pycache__" not in name:
                entry = tarfile.TarInfo(name)  # of 1970
                entry.size = file.stat().st_size
                with file.open("rb") as stream:
                    out.addfile(entry, stream)


def prune(file: Path, home: str) -> None:
    """Remove an empty file, the checksums of the code, and what names this machine."""
    if not file.stat().st_size:
        file.unlink()
    elif file.suffix in (".json", ".log", ".jsonl"):
        text = file.read_text(encoding="utf-8").replace(home, "/home/ada")
        text = text.replace(f'"{socket.gethostname()}"', '"head"')
        text = re.sub(r' *"code/.*": "[0-9a-f]{64}",\n', "", text)
        if file.name in ("run.json", "manifest.json"):
            told = json.loads(text)
            told |= {"user": "ada"} if "user" in told else {}
            if "made" in told:
                told["made"] |= {"by": "ada"}
            text = json.dumps(told, indent=1)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
