"""Dry runs of pcluster with the shipped files, with its own validators, against moto.

They find what no schema has: keys, regions, images and reservations that do not fit. With a good
file they end with the exit code 1, too.
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
from .test_cluster_file import CLUSTER, IMAGE, OF_P5, OF_TRN2, PYTHON, with_optional_lines

pytestmark = pytest.mark.rest

HERE = Path(__file__).parent
ACCOUNT = HERE / "aws_account.py"
GOOD = "Request would have succeeded, but DryRun flag is set."
SECONDS = 600


@dataclass
class Aws:
    """The account."""

    environ: dict[str, str]
    directory: Path

    def dry_run(self, file: Path, *changes: tuple[str, str], text: str = "", **account: str) -> Any:
        """Make what the file names in its region, and return what pcluster says of it."""
        text = text or file.read_text(encoding="utf-8")
        region = text.split("\nRegion: ")[1].split()[0]
        self._run(PYTHON, ACCOUNT, region, json.dumps(account))
        made = json.loads((self.directory / "made.json").read_text())
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        for name, own in made.items():
            text = text.replace(name, own)
        config = self.directory / "config.yaml"
        config.write_text(text, encoding="utf-8")
        verb: tuple[str, ...] = ("create-cluster", "-n")
        if file == IMAGE:  # it does not take the region of its file (3.16.1)
            verb = ("build-image", "-r", region, "-i")
        words = (*verb, "mine", "--dryrun", "true", "-c", config)
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
        "MOTO_AMIS_PATH": str(directory / "amis.json"), "MOTO_IAM_LOAD_MANAGED_POLICIES": "true",
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
    lines = said.get("configurationValidationErrors") or said.get("validationMessages", ())
    return {one["type"] for one in lines if one["level"] == level}


BLOCK = (
    ("ONDEMAND", "CAPACITY_BLOCK"),
    ("MinCount: 0  # for a", "MinCount: 4  # for a"),
    ("#| ", ""),
    ("Enabled: true  # for a", "Enabled: false  # for a"),
)
"""What p5-4-nodes.yaml says of a capacity block."""
OF_MANAGED = OF_P5.read_text().split("      DeploymentType: PERSISTENT_2\n")[1]
LUSTRE_BY_EFA = (("#= ", ""), (f"      DeploymentType: PERSISTENT_2\n{OF_MANAGED}", ""))
"""What it says of EFA to the file system."""
SPOT = ("CapacityType: ONDEMAND", "CapacityType: SPOT")


@pytest.mark.first
@pytest.mark.parametrize(
    ("file", "changes"),
    [(CLUSTER, ()), (OF_TRN2, ()), (OF_P5, ()), (OF_P5, BLOCK), (OF_P5, [("p5", "p5en")])],
    ids=["trn1", "trn2", "p5", "p5 of a block", "p5en"],
)
def test_shipped_files_would_be_created(aws: Aws, file: Path, changes: Any) -> None:
    said = aws.dry_run(file, *changes)
    assert said["message"] == GOOD, said
    assert not found(said, "WARNING"), said


@pytest.mark.parametrize(
    ("file", "text", "changes"),
    [
        (CLUSTER, with_optional_lines(CLUSTER, other_queue=False), (SPOT,)),
        (CLUSTER, with_optional_lines(CLUSTER, other_queue=True), ()),
        (OF_TRN2, with_optional_lines(OF_TRN2, other_queue=True), ()),
        (OF_P5, "", (*LUSTRE_BY_EFA, SPOT)),
    ],
    ids=["trn1", "trn1 of a block", "trn2 on demand", "EFA to Lustre"],
)
def test_what_the_files_offer_would_be_created(
    aws: Aws, file: Path, text: str, changes: Any
) -> None:
    said = aws.dry_run(file, *changes, text=text)
    assert said["message"] == GOOD, said
    assert not found(said, "WARNING"), said


def test_the_image_would_be_built(aws: Aws) -> None:
    """Not from a parent of another architecture, one that is not there, or one that is larger."""
    assert aws.dry_run(IMAGE) == {"message": GOOD}
    of_neuron = IMAGE.read_text().split("  Components:\n")[1].split("  # Off")[0]
    from_dlami = ((f"  Components:\n{of_neuron}", ""), ("Size: 100", "Size: 512"))
    assert aws.dry_run(IMAGE, *from_dlami) == {"message": GOOD}
    parent = "ParentImage: ami-0eeeeeeeeeeeeeeee"
    for other in ("ami-0aaaaaaaaaaaaaaa1", "ami-0bbbbbbbbbbbbbbbb"):
        said = aws.dry_run(IMAGE, (parent, f"ParentImage: {other}"))
        assert "InstanceTypeBaseAMICompatibleValidator" in found(said, "ERROR"), said
    assert found(aws.dry_run(IMAGE, ("Size: 100", "Size: 1")), "ERROR") == {
        "AMIVolumeSizeValidator"
    }


def test_what_no_schema_finds_is_said(aws: Aws) -> None:
    """An RSA key, an image that pcluster has not built, a block of another instance type."""
    assert found(aws.dry_run(OF_TRN2, key="rsa"), "ERROR") == {"KeyPairValidator"}
    said = aws.dry_run(OF_TRN2, ("    KeyName: replace-me-key", ""))
    assert (said["message"], found(said, "WARNING")) == (GOOD, {"KeyPairValidator"})
    assert "CustomAmiTagValidator" in found(aws.dry_run(CLUSTER, tags="none"), "WARNING")
    other = ("InstanceType: trn2.48xlarge  #", "InstanceType: trn1.32xlarge  #")
    assert "CapacityReservationValidator" in found(aws.dry_run(OF_TRN2, other), "ERROR")
