"""submit: prices, questions, dry runs, passed-through options, and reviewed bundles."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

TOY = ("submit", "toy", "--cluster", "pc", "--nodes", "2")
GPT2 = ("submit", "gpt2_zero1", "--cluster", "pc", "--nodes", "2")


@pytest.fixture(autouse=True)
def toy(site) -> None:
    site.recipe()


def test_price_line(fake_slurm, cli) -> None:
    done = cli(*TOY)
    assert done.err.splitlines()[0] == (
        "toy on 2 x trn1.32xlarge, 32 workers per node: about 5.0 h, 10.0 node-hours, $215; "
        "at most 19.0 node-hours within its time limits"
    )


def test_price_line_without_a_known_speed(site, fake_slurm, cli) -> None:
    site.recipe("steps: 10\nbatch: {global_batch: 64}\n")
    done = cli(*TOY, "--time", "90")
    price, graphs = done.err.splitlines()
    size, limit = price.split(": ")
    assert size == "toy on 2 x trn1.32xlarge, 32 workers per node"
    assert limit == "at most 9.0 node-hours within its time limits"
    assert graphs == (
        "Graphs: whether they are compiled is known only on the cluster (there is no "
        "/shared/venv/bin/python on this host); precompile first, at most 6.0 node-hours (its "
        "time limit)"
    )


def test_dry_run_makes_and_submits_nothing(site, fake_slurm, cli, home: Path) -> None:
    done = cli(*TOY, "--dry-run")
    assert done.code == 0
    assert "10.0 node-hours" in done.out and done.err == ""
    assert fake_slurm.calls() == []
    assert not site.run_root.exists()
    assert not any(f for f in home.rglob("*") if f.is_file())


def test_large_job_without_a_terminal_needs_yes(site, fake_slurm, cli) -> None:
    site.profile(ask_above_node_hours=9)
    refused = cli(*TOY)
    assert refused.code == 1
    price, _, error = refused.err.splitlines()
    assert "10.0 node-hours" in price
    assert (
        error
        == "error: 10.0 node-hours exceeds the 9 above which pc asks for confirmation: pass --yes"
    )
    assert fake_slurm.calls() == [] and not site.run_root.exists()
    assert cli(*TOY, "--yes").code == 0
    assert len(fake_slurm.calls("sbatch")) == 2
    site.profile(ask_above_node_hours=10)
    assert cli(*TOY).code == 0


@pytest.mark.parametrize(("answer", "code", "submitted"), [("n", 130, 0), ("y", 0, 2)])
def test_large_job_on_a_terminal_is_asked_about(
    site, fake_slurm, answer: str, code: int, submitted: int
) -> None:
    site.profile(ask_above_node_hours=9)
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trnslurm", *TOY],
            stdin=theirs, capture_output=True, text=True, timeout=600, check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(theirs)
    assert "more than 9 node-hours. Submit?" in done.stderr
    assert done.returncode == code, done
    assert len(fake_slurm.calls("sbatch")) == submitted


def test_passed_through_options_stand_in_the_file(site, fake_slurm, cli) -> None:
    words = ("--sbatch=--mail-type=FAIL", "--sbatch=--comment=it's $(mine) #1")
    assert cli(*GPT2, *words, "--sbatch", "--hold").code == 0
    for call in fake_slurm.calls("sbatch"):
        lines = call.script.decode().splitlines()
        for line in ("--mail-type=FAIL", '--comment="it\'s $(mine) #1"', "--hold"):
            assert any(li.startswith(f"#SBATCH {line} ") for li in lines)
        assert not any("mail-type" in word or "hold" in word for word in call.arguments)


@pytest.fixture
def reviewed(site, cli, tmp_path: Path) -> Path:
    directory = tmp_path / "reviewed"
    assert cli("render", *GPT2[1:], "-o", directory).code == 0
    return directory


def test_reviewed_bundle_is_submitted_byte_for_byte(site, fake_slurm, cli, reviewed: Path) -> None:
    script = reviewed / "train.sbatch"
    edited = script.read_bytes().replace(b"\nset -euo", b"\n# \xe9dited\r\nset -euo", 1)  # Latin-1
    script.write_bytes(edited)
    (reviewed / "code/jobs/gpt2_zero1/extra.bin").write_bytes(b"\0\xff")
    done = cli("submit", "--rendered", reviewed)
    assert done.code == 0, done
    run = site.run()
    assert fake_slurm.calls("sbatch")[1].script == edited
    assert run.script("train").read_bytes() == edited
    assert run.record().sha256["train.sbatch"] == hashlib.sha256(edited).hexdigest()
    assert (run.path / "code/jobs/gpt2_zero1/extra.bin").read_bytes() == b"\0\xff"
    record = run.record()
    assert (record.recipe, record.cluster, record.nodes) == ("gpt2_zero1", "pc", 2)


def test_reviewed_bundle_is_asked_about_too(site, fake_slurm, cli, tmp_path: Path) -> None:
    site.profile(ask_above_node_hours=9)
    bundle = tmp_path / "bundle"
    assert cli("render", *TOY[1:], "-o", bundle).code == 0
    refused = cli("submit", "--rendered", bundle)
    assert refused.code == 1
    assert refused.err.splitlines()[-1].endswith("above which pc asks for confirmation: pass --yes")
    assert fake_slurm.calls() == []
    assert cli("submit", "--rendered", bundle, "--yes").code == 0


def test_reviewed_bundle_does_not_need_its_recipe_any_more(
    site, fake_slurm, cli, reviewed: Path, monkeypatch
) -> None:
    monkeypatch.delenv("TRNSLURM_PATH")
    assert cli("submit", "--rendered", reviewed).code == 0
    assert len(fake_slurm.calls("sbatch")) == 2


def test_a_runs_own_directory_can_be_submitted_again(site, fake_slurm, cli) -> None:
    assert cli(*GPT2).code == 0
    first = site.run()
    (first.logs / "train-1-node0.log").write_text("old")
    assert cli("submit", "--rendered", first.path).code == 0
    second = site.runs()[-1]
    assert second.record().sha256 == first.record().sha256
    assert [f.name for f in second.logs.iterdir()] == [".keep"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "2"], "omit --nodes"),
        (["--preset", "tiny"], "omit --preset"),
        (["--time", "5"], "omit --time"),
        (["--cluster", "pc"], "omit --cluster"),
        (["--workers", "8"], "omit --workers"),
        (["--set", "steps=3"], "omit --set"),
    ],
)
def test_reviewed_bundle_takes_no_options(
    site, fake_slurm, cli, reviewed: Path, arguments: list[str], words: str
) -> None:
    done = cli("submit", "--rendered", reviewed, *arguments)
    assert done.code == 2
    assert words in done.error
    assert fake_slurm.calls() == []


@pytest.mark.parametrize("name", ["train.sbatch", "precompile.sbatch", "node.sh", "plan.json"])
def test_incomplete_bundle_is_refused(site, fake_slurm, cli, reviewed: Path, name: str) -> None:
    (reviewed / name).unlink()
    done = cli("submit", "--rendered", reviewed)
    assert done.code == 1
    assert name in done.error
    assert fake_slurm.calls() == [] and not site.run_root.exists()


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("plan.json", '"lr": ', '"lr": -', "; it must be at least 0"),
        ("plan.json", '"optimizer": "adamw"', '"optimizer": "adamv"', 'did you mean "adam"?'),
        ("plan.json", '"n_head": 25', '"n_head": 3', "model.n_head is 3; it must divide"),
        ("code/jobs/gpt2_zero1/train.py", "def main() ->", "def main( ->", "not valid Python"),
    ],
)
def test_reviewed_bundle_that_its_job_would_refuse(
    site, fake_slurm, cli, reviewed: Path, name: str, old: str, new: str, said: str
) -> None:
    text = (reviewed / name).read_text()
    assert old in text
    (reviewed / name).write_text(text.replace(old, new))
    assert said in cli("submit", "--rendered", reviewed).error
    assert fake_slurm.calls() == [] and not site.run_root.exists()


def test_recipe_and_reviewed_bundle_exclude_each_other(site, fake_slurm, cli, tmp_path) -> None:
    assert cli("submit").code == 2
    assert cli("submit", "gpt2_zero1", "--rendered", tmp_path).code == 2
    missing = cli("submit", "--rendered", tmp_path / "none")
    assert missing.code == 1
    assert missing.error == f"{tmp_path / 'none'}: no such directory"


@pytest.mark.parametrize("quoted", ['"/x y"', "'/x y'"])
def test_a_text_may_be_quoted_as_in_a_file(site, cli, quoted: str) -> None:
    site.recipe()
    done = cli("show", "toy", "--cluster", "pc", "--set", f"run_root={quoted}", "--json")
    assert json.loads(done.out)["config"]["run_root"] == "/x y"
