"""data prepare --submit: what sbatch is given; and training that is refused without data."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ..packaged import source_names

PREPARE = ("data", "prepare", "gpt2_zero1", "--preset", "small", "--cluster", "pc", "--submit")


def directives(script: bytes) -> list[str]:
    lines = [line.split() for line in script.decode().splitlines()]
    return [words[1] for words in lines if words[:1] == ["#SBATCH"]]


def prepare_words(node_script: Path) -> list[str]:
    """The command that node.sh becomes, as its shell would read it."""
    array = node_script.read_text().partition("COMMAND=(")[2].partition("\n)")[0]
    return shlex.split(array)


def test_one_job_is_submitted_and_watched_as_any_run(site, fake_slurm, cli) -> None:
    done = cli(*PREPARE)
    run = site.run()
    assert (done.code, done.out) == (
        0, f"Submitted {run.name}  prepare 1001\nSee: trnslurm status {run.name}\n",
    )  # fmt: skip
    assert run.name.endswith("-gpt2_zero1-data")
    assert done.err == (
        "gpt2_zero1 (small): prepare ~/trnslurm-data/gpt2-small, on 1 node of partition compute "
        "of pc: 8 CPUs, at most 240 minutes\n"
    )
    (call,) = fake_slurm.calls("sbatch")
    assert call.script == (run.path / "prepare.sbatch").read_bytes()
    status = cli("status", "last").out
    assert status.startswith(f"{run.name}: PENDING (waiting for jobs of higher priority)")
    assert "gpt2_zero1 (small) on 1 node of pc" in status
    assert cli("cancel", "last").out == f"Cancelled {run.name}\n"
    assert fake_slurm.calls("scancel")[0].arguments == ["1001"]


def test_node_script_reads_from_the_bundle(site, fake_slurm, cli) -> None:
    assert cli(*PREPARE, "--column", "it's $HOME", "--processes", "2").code == 0
    run = site.run()
    assert prepare_words(run.path / "node.sh")[1:] == [
        "-m", "trnslurm.prepare", "--output=~/trnslurm-data/gpt2-small",
        "--text", "code/jobs/gpt2_zero1/text.txt", "--tokenizer=train:512", "--holdout=0.05",
        "--column=it's $HOME", "--processes=2",
    ]  # fmt: skip
    assert (run.code / "jobs/gpt2_zero1/text.txt").is_file()
    assert {name.split("/")[1] for name in source_names(run.path)} == {
        "__init__.py", "calls.py", "contract", "ddp_pace.py", "devices", "frozen.py", "node",
        "pace.py", "prepare", "tracing.py",
    }  # fmt: skip


def test_shards_for_bert_are_made_in_a_job_too(site, fake_slurm, cli) -> None:
    tiny = ("bert_pretrain", "--preset", "tiny", "--cluster", "pc")
    assert cli("data", "prepare", *tiny, "--submit", "--seed", "7").code == 0
    words = prepare_words(site.run().path / "node.sh")[1:]
    assert words[:3] == ["-m", "trnslurm.prepare", "bert"]
    text = words.index("--text")
    assert words[text + 1] == "code/jobs/bert_pretrain/text.txt"
    assert (site.run().code / "jobs/bert_pretrain/text.txt").is_file()
    assert {"--seed=7", "--seq-len=32", "--processes=8"} <= set(words)


def test_training_takes_no_preparation_along(site, fake_slurm, cli) -> None:
    site.recipe()
    assert cli("submit", "toy", "--cluster", "pc").code == 0
    assert not any("/prepare/" in name for name in source_names(site.run().path))


def test_it_takes_cpus_of_a_partition_and_no_devices(site, fake_slurm, cli) -> None:
    nodes = {"constraint": "rack1", "reservation": "august", "gpus_per_node": 8}
    slurm = {"partition": "compute", "account": "team", "qos": "high", "sbatch": ["--mem=0"]}
    site.profile(slurm=slurm | nodes)
    assert cli(*PREPARE).code == 0
    cpus = {"data_partition": "cpu", "data_cpus": 64, "data_time_min": 90}
    site.profile(slurm=slurm | nodes | cpus)
    assert cli(*PREPARE).code == 0
    first, second = (directives(call.script) for call in fake_slurm.calls("sbatch"))
    common = {"--account=team", "--qos=high", "--mem=0", "--requeue", "--nodes=1"}
    assert common | {"--partition=compute", "--constraint=rack1", "--reservation=august",
                     "--cpus-per-task=8", "--time=04:00:00"} <= set(first)  # fmt: skip
    assert common | {"--partition=cpu", "--cpus-per-task=64", "--time=01:30:00"} <= set(second)
    assert not [word for word in second if word.startswith(("--constraint", "--reservation"))]
    for words in (first, second):
        assert not [word for word in words if word.startswith(("--gpus", "--exclusive"))]


def test_the_partitions_limit_holds(site, fake_slurm, cli) -> None:
    site.profile(slurm={"max_time_min": 60})
    assert "at most 60 minutes" in cli(*PREPARE, "--dry-run").out


def test_its_environment_is_the_sites_and_nothing_of_devices(site, fake_slurm, cli) -> None:
    site.profile(env={"HF_HOME": "/shared/hf"}, activate=["module load x"])
    assert cli(*PREPARE).code == 0
    script = fake_slurm.calls("sbatch")[0].script.decode()
    assert "export HF_HOME=/shared/hf" in script and "\nmodule load x\n" in script
    for word in ("NEURON", "FI_", "NCCL", "MASTER", "TRNSLURM_DEVICE"):
        assert f"export {word}" not in script


def test_dry_run_submits_nothing(site, fake_slurm, cli) -> None:
    done = cli(*PREPARE, "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("gpt2_zero1 (small): prepare ~/trnslurm-data/gpt2-small, on 1 node")
    for command in (PREPARE, [word for word in PREPARE if word != "--submit"]):
        done = cli(*command, "--dry-run", "--json")
        assert done.code == 2
        assert done.error.startswith("--dry-run does not print JSON: omit --dry-run or --json")
    assert fake_slurm.calls() == [] and site.runs() == []


def test_what_was_not_fetched_is_refused_where_one_can_tell(
    site, fake_slurm, cli, tmp_path: Path
) -> None:
    site.profile(data_root=str(tmp_path / "data"))
    submit = ("data", "prepare", "gpt2_zero1", "--cluster", "pc", "--submit")
    assert cli(*submit).code == 0  # a laptop: the cluster's file system is not here
    (tmp_path / "data").mkdir()
    assert "trnslurm data fetch gpt2_zero1 --preset xl --cluster pc" in cli(*submit).error


TRAIN = ("submit", "gpt2_zero1", "--cluster", "pc")


@pytest.fixture
def data_root(site, fake_slurm, tmp_path: Path) -> Path:
    """The data_root of `pc`, which is here."""
    directory = tmp_path / "data"
    directory.mkdir()
    site.profile(data_root=str(directory))
    return directory


def test_training_without_its_data_is_refused(site, data_root: Path, fake_slurm, cli) -> None:
    rendered = ("submit", "--rendered", site.root / "reviewed")
    assert cli("render", *TRAIN[1:], "-o", rendered[-1]).code == 0
    for command in (TRAIN, rendered):
        done = cli(*command)
        assert done.code == 1
        assert done.err.splitlines()[-1] == (
            f"error: no prepared data at {data_root}/wikitext-103: run trnslurm data prepare "
            "gpt2_zero1 --preset xl --cluster pc"
        )
    assert fake_slurm.calls() == [] and site.runs() == []


@pytest.mark.parametrize(
    "name", ["wikitext-103/index.json", "wikitext-103", "wikitext-103/a_training_0.hdf5"]
)
def test_prepared_data_a_text_or_shards_will_do(data_root: Path, cli, name: str) -> None:
    (data_root / name).parent.mkdir(exist_ok=True)
    (data_root / name).touch()
    assert cli(*TRAIN, "--set", "train.eval_every=0").code == 0


def test_a_job_that_brings_its_data_needs_none(data_root: Path, cli) -> None:
    assert cli(*TRAIN, "--preset", "tiny", "--allow-idle").code == 0


@pytest.mark.parametrize("root", ["/nowhere/data", "~no_such_user/data"])
def test_where_the_root_is_not_here_nobody_can_tell(site, fake_slurm, cli, root: str) -> None:
    site.profile(data_root=root)
    assert cli(*TRAIN).code == 0


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"seq_len": 64, "max_pred": 5}, "seq_len is 32, but the data at {} was prepared with 64"),
        ({"seq_len": 32, "max_pred": 9}, "train.max_pred is 5, but the data at {} was prepared"),
        ({"vocab_size": 600}, "model.vocab_size is 512, but the data at {} has 600 tokens"),
    ],
)
def test_data_for_something_else_is_refused(data_root: Path, fake_slurm, cli, index, words) -> None:
    data = data_root / "bert-tiny-seqlen32"
    data.mkdir()
    (data / "index.json").write_text(json.dumps(index))
    tiny = ("submit", "bert_pretrain", "-p", "tiny", "-c", "pc", "--allow-idle")
    for more in ((), ("--dry-run",)):
        assert words.format(data) in cli(*tiny, *more).error
    (data / "index.json").write_text('{"seq_len": 32, "max_pred": 5, "vocab_size": 512}')
    assert cli(*tiny).code == 0
