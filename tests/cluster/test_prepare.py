"""data fetch, prepare and verify on this host: what the cluster's Python is started with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
WIKITEXT = "hub/Salesforce--wikitext--wikitext-103-raw-v1--gpt2"
# Prints what it was started with as JSON; it is asked for its modules first.
PYTHON = """\
#!/bin/bash
if [ "$1" = -c ]; then exit 0; fi
umask >&2
ls "$PYTHONPATH" >&2
printf '%s\\0' "$@"
exit "${CODE:-0}"
"""


@pytest.fixture
def here(site, tmp_path: Path) -> Path:
    """Make this host a cluster with a stand-in for Python; return its data_root."""
    python = tmp_path / "a python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    data_root = tmp_path / "data"
    site.profile(
        "here", scheduler="local", instance_type="local", device="cpu", python=str(python),
        prefer_preset="tiny", data_root=str(data_root), slurm={},
    )  # fmt: skip
    return data_root


@pytest.fixture
def data(here: Path, cli) -> Callable[..., list[str]]:
    """Run `trnslurm data … --cluster here`; return the words after the package's name."""

    def run(*words: str) -> list[str]:
        done = cli("data", *words, "--cluster", "here")
        assert done.code == 0, done
        dash, package, *arguments = done.out.split("\0")[:-1]
        assert (dash, package) == ("-m", "trnslurm.prepare")
        return arguments

    return run


def fetched(data_root: Path) -> Path:
    directory = data_root / WIKITEXT
    directory.mkdir(parents=True)
    (directory / "dataset.json").write_text("{}")
    return directory


def test_fetch_is_told_what_the_recipe_names(data, here: Path) -> None:
    assert data("fetch", "gpt2_zero1", "--revision", "v1", "--force") == [
        "fetch", f"--output={here / WIKITEXT}", "--dataset=Salesforce/wikitext",
        "--config=wikitext-103-raw-v1", "--tokenizer=gpt2", "--revision=v1", "--force",
    ]  # fmt: skip
    words = data("fetch", "gpt2_zero1", "--set", "data.dataset_config=null",
                 "--set", "data.tokenizer=train:300")  # fmt: skip
    assert words == [
        "fetch", f"--output={here}/hub/Salesforce--wikitext", "--dataset=Salesforce/wikitext"
    ]  # fmt: skip


def test_what_was_fetched_is_prepared_with_its_tokenizer(data, here: Path) -> None:
    directory = fetched(here)
    assert data("prepare", "gpt2_zero1") == [
        f"--output={here}/wikitext-103", f"--dataset={directory}", f"--tokenizer={directory}"
    ]  # fmt: skip


def test_what_was_not_fetched_is_refused(here: Path, cli) -> None:
    said = (
        f"no dataset at {here / WIKITEXT}: run trnslurm data fetch gpt2_zero1 --preset xl "
        "--cluster here"
    )
    for more in ([], ["--text", str(ROOT / "README.md")]):  # of the latter, the tokenizer
        assert cli("data", "prepare", "gpt2_zero1", "--cluster", "here", *more).error == said


def test_a_text_of_the_recipe_needs_no_dataset(data, here: Path) -> None:
    text = ROOT / "jobs/gpt2_zero1/text.txt"
    assert data("prepare", "gpt2_zero1", "--preset", "small") == [
        f"--output={here}/gpt2-small", "--text", str(text), "--tokenizer=train:512",
        "--holdout=0.05",
    ]  # fmt: skip


def test_home_is_that_of_jobs(site, data, here: Path, cli, tmp_path: Path, monkeypatch) -> None:
    """On Slurm the batch script takes it from the user database, whatever $HOME is here."""
    python = str(tmp_path / "a python")
    site.profile("pc", python=python, data_root="~/data", run_root="~/runs", slurm={})
    home = SimpleNamespace(pw_dir=str(tmp_path / "passwd"))
    monkeypatch.setattr("trnslurm.schedulers.slurm.scheduler.pwd.getpwuid", lambda _: home)
    done = cli("data", "prepare", "gpt2_zero1", "--preset", "small", "--cluster", "pc")
    assert f"--output={home.pw_dir}/data/gpt2-small" in done.out.split("\0")
    (tmp_path / "passwd/data").mkdir(parents=True)
    submit = ("submit", "gpt2_zero1", "-p", "small", "-c", "pc", "--time=9", "--allow-idle")
    missing = cli(*submit, "--dry-run").error
    assert missing.startswith("no prepared data at ~/data/gpt2-small: run trnslurm data prepare")
    (tmp_path / "passwd/data/gpt2-small").mkdir()
    (tmp_path / "passwd/data/gpt2-small/index.json").write_text("{}")
    assert cli(*submit, "--dry-run").code == 0
    assert cli("compile", "status", "--cluster", "pc").out == (
        f"Nothing is compiled in {home.pw_dir}/runs/.compiled\n"
    )


def test_own_text_and_every_other_option(data, here: Path, weird_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(weird_path)
    for name in ("a.txt", "it's b.txt", "my tokenizer.json"):
        Path(name).touch()
    words = data(
        "prepare", "gpt2_zero1", "--preset", "small", "--set", "data.path=mine",
        "--text", "a.txt", "--text", "it's b.txt", "--tokenizer", "my tokenizer.json",
        "--end-of-text", "<eos>", "--document-start", "^ = $x", "--column", "body",
        "--holdout", "0", "--processes", "3", "--force", "--json",
    )  # fmt: skip
    assert words == [
        f"--output={here}/mine", "--text", f"{weird_path}/a.txt", f"{weird_path}/it's b.txt",
        f"--tokenizer={weird_path}/my tokenizer.json", "--holdout=0.0", "--end-of-text=<eos>",
        "--document-start=^ = $x", "--column=body", "--force", "--processes=3", "--json",
    ]  # fmt: skip
    words = data("prepare", "gpt2_zero1", "-p", "small", "--document-per", "line")
    assert words[-1] == "--document-per=line"


def test_a_tokenizer_of_the_recipes_directory(site, data, here: Path) -> None:
    site.recipe("batch: {global_batch: 8}\ndata: {path: x, text: a.txt, tokenizer: own.json}\n")
    job = site.root / "jobs/toy"
    assert data("prepare", "toy") == [
        f"--output={here}/x", "--text", f"{job}/a.txt", f"--tokenizer={job}/own.json"
    ]  # fmt: skip
    elsewhere = data("prepare", "toy", "--set", "data.tokenizer=~/own.json")
    assert elsewhere[-1] == "--tokenizer=~/own.json"  # for the program to expand


TINY = [
    "--tokenizer=train:512", "--holdout=0.05", "--seq-len=32", "--max-pred=5",
    "--masked-lm-prob=0.15", "--dupe-factor=5", "--seed=12345", "--shards=4", "--test-shards=1",
]  # fmt: skip


def test_shards_for_bert_of_the_recipes_text(data, here: Path) -> None:
    text = ROOT / "jobs/bert_pretrain/text.txt"
    assert data("prepare", "bert_pretrain", "--preset", "tiny") == [
        "bert", f"--output={here}/bert-tiny-seqlen32", "--text", str(text), "--wrapped", *TINY
    ]  # fmt: skip


def test_shards_for_bert_of_own_text_with_every_option(data, weird_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(weird_path)
    Path("it's a.txt").touch()
    Path("texts").mkdir()
    words = "--seq-len 128 --max-pred 20 --masked-lm-prob 0.15 --dupe-factor 5 --shards 2"
    given = data(
        "prepare", "bert_pretrain", "--input", "it's a.txt", "--input", "texts",
        "--output", "../shards", *words.split(),
    )  # fmt: skip
    assert given == [
        "bert", f"--output={weird_path.parent}/shards",
        "--text", f"{weird_path}/it's a.txt", f"{weird_path}/texts", "--tokenizer=train:30522",
        "--seq-len=128", "--max-pred=20", "--masked-lm-prob=0.15", "--dupe-factor=5",
        "--seed=12345", "--shards=2", "--test-shards=1",
    ]  # fmt: skip
    words = "--seq-len 16 --max-pred 2 --masked-lm-prob 0.2 --dupe-factor 1 --shards 7 --seed 0"
    more = "--test-shards 3 --holdout 0.1 --whole-words --wrapped --tokenizer train:100 --force"
    given = data("prepare", "bert_pretrain", "--wikiextractor", "texts", "--output", "shards",
                 *words.split(), *more.split(), "--processes", "2", "--json")  # fmt: skip
    assert given == [
        "bert", f"--output={weird_path}/shards", "--wikiextractor", f"{weird_path}/texts",
        "--tokenizer=train:100", "--holdout=0.1", "--seq-len=16", "--max-pred=2",
        "--masked-lm-prob=0.2", "--whole-words", "--dupe-factor=1", "--seed=0", "--shards=7",
        "--test-shards=3", "--wrapped", "--force", "--processes=2", "--json",
    ]  # fmt: skip


def test_shards_for_bert_of_a_dataset_of_the_hub(data, here: Path) -> None:
    hub = here / "hub/some--articles--bert"
    wanted = ("--set", "data.dataset=some/articles", "--set", "data.tokenizer=bert")
    assert data("fetch", "bert_pretrain", *wanted, "--column", "body") == [
        "fetch", f"--output={hub}", "--dataset=some/articles", "--tokenizer=bert", "--column=body"
    ]  # fmt: skip
    hub.mkdir(parents=True)
    (hub / "dataset.json").write_text("{}")
    words = data("prepare", "bert_pretrain", *wanted, "--output", "/data/articles")
    assert words[:3] == ["bert", "--output=/data/articles", f"--dataset={hub}"]
    assert words[3] == f"--tokenizer={hub}"


def test_published_shards_and_checkpoints(data, here: Path) -> None:
    s3 = "https://neuron-s3.s3.amazonaws.com"
    name = "bert_pretrain_wikicorpus_tokenized_hdf5"
    assert data("fetch", "bert_pretrain", "--preset", "phase2", "--force") == [
        "download", f"--url={s3}/training_datasets/{name}/{name}_seqlen512.tar",
        f"--output={here}/{name}_seqlen512", "--shards", "--seq-len=512", "--max-pred=80",
        "--force",
    ]  # fmt: skip
    checkpoints = f"{s3}/training_checkpoints/pytorch/dp_bert_large_hf_pretrain"
    for preset, number in (("phase1", 28125), ("phase2", 29688)):
        assert data("fetch", "bert_pretrain", "--preset", preset, "--checkpoint") == [
            "download", f"--url={checkpoints}/ckpt_{number}.pt",
            f"--output={here}/published/ckpt_{number}",
        ]  # fmt: skip


def test_verify_takes_a_recipe_or_a_directory(data, here: Path, monkeypatch) -> None:
    assert data("verify", "gpt2_zero1") == ["verify", f"{here}/wikitext-103"]
    (here / "mine").mkdir(parents=True)
    monkeypatch.chdir(here)
    for name in ("mine", "./mine"):
        assert data("verify", name) == ["verify", f"{here}/mine"]


def test_it_gets_our_package_alone_and_the_profiles_umask(site, here: Path, cli) -> None:
    done = cli("data", "verify", "gpt2_zero1", "--cluster", "here")
    assert done.err == "0077\ntrnslurm\n"
    shared = "group_readable=true"
    done = cli("data", "verify", "gpt2_zero1", "--cluster", "here", "--set", shared)
    assert done.err == "0027\ntrnslurm\n"


def test_its_exit_code_is_ours(here: Path, cli, monkeypatch) -> None:
    monkeypatch.setenv("CODE", "7")
    assert cli("data", "verify", "gpt2_zero1", "--cluster", "here").code == 7


def test_a_host_without_the_clusters_python(site, cli) -> None:
    absent = "the cluster's Python, /shared/venv/bin/python, is not on this host: run this command"
    small = ("gpt2_zero1", "--preset", "small", "--cluster", "pc")
    assert cli("data", "prepare", *small).error == (
        f"{absent} on a host that has it, such as the login node, or pass --submit"
    )
    for verb in ("fetch", "verify"):
        done = cli("data", verb, "gpt2_zero1", "--cluster", "pc")
        assert done.error == f"{absent} on a host that has it, such as the login node"


def test_dry_run_starts_nothing(site, cli) -> None:
    done = cli("data", "prepare", "gpt2_zero1", "-p", "small", "-c", "pc", "--dry-run")
    said = "gpt2_zero1 (small): prepare ~/trnslurm-data/gpt2-small, on this host\n"
    assert (done.code, done.out, done.err) == (0, said, "")


def test_without_a_choice_it_is_this_machine(site, cli, monkeypatch) -> None:
    monkeypatch.setattr("trnslurm.submission.choice.slurm_hint", lambda: (None, False))
    done = cli("data", "prepare", "gpt2_zero1", "-p", "small", "--dry-run")
    assert done.err == "Using --cluster local by default\n"
    monkeypatch.setattr("trnslurm.submission.choice.slurm_hint", lambda: ("/bin/srun", True))
    assert "no cluster profile is chosen" in cli("data", "prepare", "gpt2_zero1").error


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("prepare gpt2_zero1 -p tiny", "gpt2_zero1 (tiny) includes its own data"),
        ("verify gpt2_zero1 -p tiny", "gpt2_zero1 (tiny) includes its own data"),
        (
            "fetch gpt2_zero1 -p small",
            "gpt2_zero1 (small) has no data.dataset, so there is nothing",
        ),
        ("prepare gpt2_zero1 -p small --set data.text=null", "neither data.dataset nor data.text"),
        ("prepare gpt2_zero1 -p small --text no.txt", "--text or --input no.txt: no such file"),
        ("prepare gpt2_zero1 -p small --tokenizer no", "--tokenizer no: no such file"),
        ("prepare gpt2_zero1 -p small --holdout 1", "data.holdout is 1.0; it must be less than 1"),
        ("prepare gpt2_zero1 --set data_root=data", "data_root is 'data': it must be absolute"),
        ("prepare gpt2_zero1 -p small --submit", "--submit: here has no Slurm: omit --sub"),
        ("prepare gpt2_zero -p small", "unknown recipe 'gpt2_zero'"),
        (
            "prepare bert_pretrain",
            "pass --input TEXT, or fetch the published data with trnslurm data fe",
        ),
        ("prepare bert_pretrain --input no.txt", "--text or --input no.txt: no such file"),
        (
            "prepare bert_pretrain -p tiny --shards 0",
            "data.bert.shards is 0; it must be at least 1",
        ),
        ("prepare bert_pretrain -p tiny --masked-lm-prob 1", "masked_lm_prob is 1.0; it must be"),
        (
            "fetch bert_pretrain --set data.path=",
            "data.path is empty: set it to a directory for",
        ),
        (
            "fetch bert_pretrain -p tiny",
            "(tiny) has no data.published, so there is nothing to fetch",
        ),
        ("fetch bert_pretrain -p phase2_lamb --checkpoint", "has no data.checkpoint, so there is"),
        (
            "fetch gpt2_zero1 --set data.published=http://x/y.tar",
            "data.published works only with BERT shards",
        ),
        ("fetch bert_pretrain --set data.published=x.tar", "'x.tar': it must be the URL of a file"),
    ],
)
def test_what_cannot_be_done_is_one_line(here: Path, cli, words: str, error: str) -> None:
    done = cli("data", *words.split(), "--cluster", "here")
    assert done.code == 1
    assert error in done.error


@pytest.mark.parametrize(
    "words",
    [
        "prepare gpt2_zero1 --follow",
        "prepare gpt2_zero1 --document-per line --document-start x",
        "prepare gpt2_zero1 --processes 0",
        "prepare bert_pretrain --text README.md --wikiextractor tests",
        "prepare bert_pretrain --preset tiny --end-of-text x",
        "prepare gpt2_zero1 --preset small --seq-len 32",
        "prepare gpt2_zero1 --preset small --whole-words",
        "fetch bert_pretrain --revision x",
        "fetch gpt2_zero1 --checkpoint",
        "verify ./x --preset small",
        "verify ./x --set steps=3",
    ],
)
def test_wrong_usage(here: Path, cli, words: str) -> None:
    done = cli("data", *words.split(), "--cluster", "here")
    assert done.code == 2
    assert done.error
