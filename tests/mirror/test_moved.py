"""resume s3://…: a new run on another cluster, made of what S3 has; and what is refused."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from trnslurm.contract.files import write_json
from trnslurm.mirror.copies import unpacked
from trnslurm.mirror.store import MirrorError
from trnslurm.records.run import RunDir

from ..packaged import source_names
from ..processes import run_process
from .server import BUCKET, Server
from .test_mirror import environ

pytestmark = pytest.mark.rest

PLACE = f"s3://{BUCKET}/moved"
RECIPE = """\
steps: 30
batch: {global_batch: 64}
train: {init_from: '', save_every: 5}
slurm: {max_crashes: 7}
env: {OF_RECIPE: '1'}
"""


@pytest.fixture
def moved(server: Server, site, fake_slurm, cli) -> RunDir:
    """A run whose files are gone, but for their copy in S3."""
    site.recipe(RECIPE)
    site.profile(env={"OF_PROFILE": "1"}, python=sys.executable)
    sets = (
        f"mirror={PLACE}",
        "slurm.time_min=77",
        "slurm.partition=mine",
        f"train.init_from={site.root}",
    )
    words = [word for each in (*sets, f"run_root={site.run_root}") for word in ("--set", each)]
    done = cli("submit", "toy", "--cluster", "pc", "--nodes", "2", *words)
    assert done.code == 0, done
    run: RunDir = site.run()
    checkpoint = run.checkpoints / "step-00000020"
    checkpoint.mkdir(parents=True)
    facts = {"global_batch": 64, "recipe": "toy"}
    write_json(checkpoint / "manifest.json", {"step": 20, "files": {}, "facts": facts})
    send = [sys.executable, "-m", "trnslurm.mirror", "send"]
    assert run_process(send, cwd=run.path, env=environ()).code == 0
    shutil.rmtree(run.path)
    shutil.rmtree(site.root / "jobs")
    fake_slurm.forget_calls()
    return run


def test_a_run_goes_on_on_another_cluster(moved: RunDir, site, fake_slurm, cli) -> None:
    site.profile("other", env={"OF_OTHER": "1"}, python=sys.executable,
                 slurm={"partition": "theirs"})  # fmt: skip
    place = f"{PLACE}/{moved.name}"
    done = cli("resume", place, "--cluster", "other", "--set", "train.save_every=9")
    assert done.code == 0, done
    assert f"{moved.name} continues after step 20 from {place}" in done.err
    script = fake_slurm.calls("sbatch")[-1].script.decode()
    assert "#SBATCH --partition=theirs " in script and "#SBATCH --time=01:17:00 " in script
    assert "--max-crashes=7 " in script
    for name, there in {"RECIPE": True, "OTHER": True, "PROFILE": False}.items():
        assert (f"export OF_{name}=1" in script) == there
    run = site.run()
    record = run.record()
    assert (record.copied_from, record.nodes, record.cluster) == (place, 2, "other")
    assert (run.code / "jobs/toy/train.py").read_text() == "print('trained')\n"
    assert "trnslurm/mirror/program.py" in source_names(run.path)
    assert json.loads(run.mirror_file.read_text())["place"] == PLACE
    train = json.loads(run.plan_file.read_text())["train"]
    assert train == {"init_from": "", "save_every": 9}
    assert f"continues {place}\n" in cli("status", "last").out


def test_what_is_no_copy_is_refused(moved: RunDir, site, fake_slurm, cli, server: Server) -> None:
    place = f"{PLACE}/{moved.name}"
    assert "there is no complete checkpoint of a run" in cli("resume", PLACE).error
    assert "expected s3://BUCKET/PREFIX" in cli("resume", "s3://A").error
    assert "trnslurm resume s3://x/y" in cli("plan", "gpt2_zero1", "--from", "s3://x/y").error
    assert (
        "was trained with a global batch of 64"
        in cli("resume", place, "--cluster", "pc", "--set", "batch.global_batch=128").error
    )
    objects, record = server.client(), f"moved/{moved.name}/run.json"
    told = json.loads(objects.get_object(Bucket=BUCKET, Key=record)["Body"].read())
    objects.put_object(Bucket=BUCKET, Key=record, Body=json.dumps(told | {"format": 2}).encode())
    assert "was made by a newer trnslurm (format 2, " in cli("resume", place).error
    key = f"moved/{moved.name}/config.yaml"
    server.client().put_object(Bucket=BUCKET, Key=key, Body=b"{")
    assert "its config.yaml or run.json is damaged" in cli("resume", place).error
    server.gate.refuses = True
    assert "Connection was closed" in cli("resume", place).error
    assert site.runs() == [] and fake_slurm.calls("sbatch") == []


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x"])
def test_code_stays_in_its_place(name: str) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(MirrorError, match="is not a file of a run's code"):
        unpacked(data.getvalue())
    with pytest.raises(MirrorError, match="damaged"):
        unpacked(b"no archive")


def test_a_python_without_boto3(site, fake_slurm, cli, tmp_path: Path) -> None:
    """It is one line, before anything is queued."""
    python = tmp_path / "venv/bin/python"
    (tmp_path / "venv/lib/python3.11/site-packages").mkdir(parents=True)
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    site.recipe(RECIPE)
    site.profile(python=str(python))
    toy = ("submit", "toy", "--cluster", "pc", "--nodes", "2", "--time", "60")
    error = cli(*toy, "--set", f"mirror={PLACE}").error
    assert error == (
        f"mirror is set, but {python} does not have boto3: run pip install '.[s3]' in a clone "
        "of trnslurm there, or pass --set mirror=null"
    )
    for wrong in ("s3:/x", "s3://B/x", "s3://bucket/../x", "s3://bucket/a b", "gs://bucket"):
        assert "it must be s3://BUCKET/PREFIX" in cli(*toy, "--set", f"mirror={wrong}").error
    assert fake_slurm.calls("sbatch") == []
    assert site.runs() == []
