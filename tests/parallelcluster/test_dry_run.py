"""`pcluster create-cluster --dryrun` of the shipped files, with its own validators, against moto.

It finds what no schema has: keys, regions, images and reservations that do not fit. Of a good file
it ends with the exit code 1, too.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..free_port import free_port
from ..processes import run_process
from ..waiting import eventually
from .test_cluster_file import CLUSTER, OF_TRN2, PYTHON

HERE = Path(__file__).parent
ACCOUNT = HERE / "aws_account.py"
GOOD = "Request would have succeeded, but DryRun flag is set."
SECONDS = 120


@dataclass
class Aws:
    """The account."""

    environ: dict[str, str]
    directory: Path

    def dry_run(self, file: Path, *changes: tuple[str, str], **account: str) -> Any:
        """Make what the file names in its region, and return what pcluster says of it."""
        text = file.read_text(encoding="utf-8")
        region = text.split("\nRegion: ")[1].split()[0]
        self._run(PYTHON, ACCOUNT, region, json.dumps(account))
        made = json.loads((self.directory / "made.json").read_text())
        for old, new in (*made.items(), *changes):
            assert old in text, old
            text = text.replace(old, new)
        config = self.directory / "cluster.yaml"
        config.write_text(text, encoding="utf-8")
        words = ("create-cluster", "--dryrun", "true", "-n", "mine", "-c", config)
        said = self._run(PYTHON.with_name("pcluster"), *words, code=1)
        return json.loads(said)

    def _run(self, *command: Any, code: int = 0) -> str:
        done = run_process([*map(str, command)], env=self.environ, cwd=self.directory,
                           timeout_s=SECONDS)  # fmt: skip
        assert done.code == code, done
        return done.out


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aws]:
    directory = tmp_path_factory.mktemp("aws")
    port, log = free_port(), directory / "log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environ = kept | {
        "HOME": str(directory), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "mine", "no_proxy": "127.0.0.1",
        "MOTO_AMIS_PATH": str(directory / "amis.json"),
    }  # fmt: skip
    made = subprocess.run(
        [PYTHON, ACCOUNT], cwd=directory, env=environ, timeout=SECONDS, check=True
    )
    assert made.returncode == 0
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [PYTHON, HERE / "aws_stand_in.py", str(port)], env=environ, stdout=stream, stderr=stream
        )
    try:
        eventually(lambda: b"Running on" in log.read_bytes(), SECONDS, said=log.read_text)
        yield Aws(environ, directory)
    finally:
        server.kill()
        server.wait()


def found(said: Any, level: str) -> set[str]:
    lines = said.get("configurationValidationErrors") or said["validationMessages"]
    return {one["type"] for one in lines if one["level"] == level}


@pytest.mark.parametrize("file", [CLUSTER, OF_TRN2], ids=lambda file: file.stem)
def test_shipped_files_would_be_created(aws: Aws, file: Path) -> None:
    said = aws.dry_run(file)
    assert said["message"] == GOOD
    assert {one["level"] for one in said["validationMessages"]} == {"INFO"}


def test_what_no_schema_finds_is_said(aws: Aws) -> None:
    """An RSA key, an image that pcluster has not built, a block of another instance type."""
    assert found(aws.dry_run(OF_TRN2, key="rsa"), "ERROR") == {"KeyPairValidator"}
    assert "CustomAmiTagValidator" in found(aws.dry_run(CLUSTER, tags="none"), "WARNING")
    other = ("InstanceType: trn2.48xlarge  #", "InstanceType: trn1.32xlarge  #")
    assert "CapacityReservationValidator" in found(aws.dry_run(OF_TRN2, other), "ERROR")
