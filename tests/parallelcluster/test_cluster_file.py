"""The shipped ParallelCluster files, checked by the aws-parallelcluster package itself."""

import os
import re
from pathlib import Path

import pytest

from ..processes import Done, run_process

REPO = Path(__file__).resolve().parents[2]
CONFIG = REPO / "cluster-config" / "parallelcluster"
CLUSTER = CONFIG / "trn1-16-nodes.yaml"
OF_TRN2 = CONFIG / "trn2-16-nodes.yaml"
OF_P5 = CONFIG / "p5-4-nodes.yaml"
IMAGE = CONFIG / "neuron-image.yaml"
PYTHON = Path(
    os.environ.get("TRNSLURM_PCLUSTER_PYTHON", REPO / ".venv-pcluster" / "bin" / "python")
)


def validate(*files: Path) -> Done:
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} does not exist: make setup", pytrace=False)
    return run_process([PYTHON, Path(__file__).parent / "validate.py", *files])


def changed(old: str, new: str, text: str | None = None) -> str:
    text = CLUSTER.read_text(encoding="utf-8") if text is None else text
    assert old in text
    return text.replace(old, new, 1)


def with_optional_lines(file: Path, *, other_queue: bool) -> str:
    """Return a file with all that it offers, and one of its two queues for training."""
    text = re.sub(r"#\| ?", "", file.read_text(encoding="utf-8"))
    first, other = (m.start() for m in re.finditer(r"^    - Name: (?!cpu$|login$)", text, re.M))
    queues = text[first:other], text[other : text.index("\nSharedStorage:")]
    return text.replace(queues[not other_queue], "\n")


def test_shipped_files_are_valid() -> None:
    result = validate(CLUSTER, OF_TRN2, OF_P5, IMAGE)
    assert result.code == 0, result.out + result.err
    assert "compute-dy-trn1-[1-16]" in result.out
    assert "trn2-st-trn2-[1-16]" in result.out
    assert "gpu-dy-p5-[1-4]" in result.out
    assert "neuron-image.yaml: image" in result.out
    assert result.err == ""


@pytest.mark.parametrize(
    ("file", "nodes"),
    [(CLUSTER, "compute-st-trn1-[1-16]"), (OF_TRN2, "trn2-dy-trn2-[1-16]")],
)
def test_optional_lines_are_valid(tmp_path: Path, file: Path, nodes: str) -> None:
    """With the other queue of the file: a capacity block for one on demand, or the reverse."""
    variant = tmp_path / "optional.yaml"
    variant.write_text(with_optional_lines(file, other_queue=True), encoding="utf-8")
    result = validate(variant)
    assert result.code == 0, result.out + result.err
    assert nodes in result.out


MISTAKES = [
    ("MaxCount: 16", "MaximumCount: 16", "Unknown field"),
    ("PERSISTENT_2", "PERSISTENT_9", "DeploymentType"),
    ("subnet-0bbbbbbbbbbbbbbbb", "subnet-REPLACE_ME", "SubnetIds"),
    ("StorageCapacity: 4800", "StorageCapacity: 4000", "FsxStorageCapacityValidator"),
    ("KillWait: 120", "ResumeTimeout: 120", "CustomSlurmSettingsValidator"),
    ("Name: trn1", "Name: TRN1", "NameValidator"),
    (
        "        PlacementGroup:\n          Enabled: true",
        "        PlacementGroup: {}",
        "EfaPlacementGroupValidator",
    ),
]


def test_mistakes_are_refused(tmp_path: Path) -> None:
    """Of files with one mistake each, every one is refused for its own; one start checks all."""
    files = [tmp_path / f"wrong-{number}.yaml" for number in range(len(MISTAKES))]
    for file, (old, new, _) in zip(files, MISTAKES, strict=True):
        file.write_text(changed(old, new), encoding="utf-8")
    result = validate(*files)
    assert result.code == 1
    assert "OK: " not in result.out
    for file, (_, new, message) in zip(files, MISTAKES, strict=True):
        said = [line for line in result.out.splitlines() if line.startswith(f"error: {file}: ")]
        assert any(message in line for line in said), (new, said)


KEY_TYPES = """
import sys
from unittest.mock import patch
from pcluster.validators.ec2_validators import KeyPairValidator
for kind in ("ed25519", "rsa"):
    with patch("pcluster.validators.ec2_validators.KeyPairInfo") as answer:
        answer.return_value.key_type = kind
        found = KeyPairValidator().execute(key_name="key", os=sys.argv[1])
    print(kind, *[failure.message for failure in found])
"""


def test_the_key_pair_must_not_be_rsa() -> None:
    os_name, said = re.search(r"Os: (\S+)[\s\S]*KeyName: \S+ +# (.*)", CLUSTER.read_text()).groups()
    result = run_process([PYTHON, "-c", KEY_TYPES, os_name])
    ed25519, rsa = result.out.splitlines()
    assert ed25519 == "ed25519", result.out + result.err
    assert "use an ed25519 key" in rsa
    assert "ed25519" in said


def test_every_placeholder_is_marked() -> None:
    placeholder = re.compile(r"replace-me|203\.0\.113\.|(subnet|ami|sg|cr)-0\w{16}|us-\w+-2")
    for path in CONFIG.glob("*.yaml"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for above, line in zip(["", *lines], lines, strict=False):
            if placeholder.search(line):
                assert "REPLACE" in line + above, f"{path.name}: {line}"
