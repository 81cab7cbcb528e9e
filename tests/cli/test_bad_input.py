"""What a user gets wrong on the command line: one line that says what to do, and nothing made."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import trnslurm
from trnslurm.errors import RunError
from trnslurm.runs.root import check_run_root
from trnslurm.submission import choice

SUBMIT = ("submit", "gpt2_zero1", "--cluster", "pc")


@pytest.fixture
def refused(site, fake_slurm, cli):
    """Call the command line, and return its one error line: nothing was made or submitted."""

    def call(*arguments: str | Path, code: int = 1) -> str:
        done = cli(*arguments)
        assert done.code == code, done
        assert fake_slurm.calls() == []
        assert not site.run_root.exists()
        return done.error

    return call


# Arguments of submit -> what the line must say.
BATCHES_AND_SHAPES = {
    "no node": (["--nodes", "0"], "--nodes 0: a job needs at least one node"),
    "fewer than none": (["--nodes", "-3"], "--nodes -3: a job needs at least one node"),
    "more nodes than there are": (["--nodes", "5"], "--nodes 5 is more than slurm.max_nodes (4)"),
    "single-node type": (
        ["--nodes", "2", "--set", "instance_type=trn1.2xlarge"],
        "trn1.2xlarge does not run multi-node jobs (--nodes 2): use --nodes 1",
    ),
    "seven workers": (
        ["--nodes", "1", "--workers", "7"],
        "7 workers per node is not valid on trn1.32xlarge with one node: choose 1, 2, 8 or 32",
    ),
    "eight workers on two": (["--nodes", "2", "--workers", "8"], "with 2 nodes: choose 32"),
    "one worker on two": (["--nodes", "2", "--workers", "1"], "1 worker per node is not valid on"),
    "no worker": (["--workers", "0"], "--workers 0: a node needs at least one worker"),
    "fewer units than workers": (
        ["--set", "batch.global_batch=16"],
        "is 16 micro-batches per step, fewer than 1 x 32 workers; nearest: global batch 32, "
        "or --allow-idle",
    ),
    "uneven units": (
        ["--set", "batch.micro_batch=3"],
        "global batch 512 is not a whole number of micro-batches of 3; nearest: micro-batch 2 or 4",
    ),
    "no unit": (["--set", "batch.micro_batch=0"], "batch.micro_batch is 0; it must be at least 1"),
    "unknown type": (["--set", "instance_type=trn1.32xlrge"], '(did you mean "trn1.32xlarge"?)'),
    "auto on slurm": (["--set", "instance_type=auto"], "unknown instance type 'auto'"),
}
WORDS = {
    "preset": (["--preset", "tinny"], "has no preset 'tinny' (did you mean \"tiny\"?)"),
    "preset unlike any": (["--preset", "zzz"], "; its presets: xl, tutorial, tiny"),
    "key": (["--set", "batch.micro_bacth=2"], '(did you mean "batch.micro_batch"?)'),
    "key of the job": (["--set", "train.lrr=1"], 'train.lrr (did you mean "train.lr"?)'),
    "key without its section": (["--set", "lr=0.1"], 'unknown key lr (did you mean "train.lr"?)'),
    "key in another section": (["--set", "train.steps=1"], '(did you mean "steps"?)'),
    "misspelt in another section": (["--set", "train.stpes=1"], '(did you mean "steps"?)'),
    "key that is none": (["--set", "slurm.mail=x"], "unknown key slurm.mail; known: slurm.p"),
    "spares below none": (["--spares", "-1"], "--spares -1: must be 0 or more"),
    "spares of this machine": (
        ["--cluster", "local", "-p", "tiny", "--spares", "1"],
        "--spares 1: this machine has no spare nodes, so spares are useless",
    ),
    "section": (["--set", "bacth=2"], 'unknown key bacth (did you mean "batch"?)'),
    "no equals sign": (["--set", "steps"], "expected key=value, such as --set batch.micro_batch=2"),
    "no key": (["--set", "=3"], "expected key=value"),
    "text for a number": (["--set", "steps=many"], "steps must be a whole number, found 'many'"),
    "fraction": (["--set", "steps=1.5"], "steps must be a whole number, found 1.5"),
    "truth for a number": (["--set", "steps=true"], "steps must be a whole number, found True"),
    "negative": (["--set", "steps=-1"], "steps is -1; it must be at least 1"),
    "wrong word": (["--set", "precision=fp8"], "expected one of fp32, mixed, bf16"),
    "mapping for a number": (["--set", "seed={a: 1}"], "seed must be a whole number"),
    "broken YAML": (["--set", "batch={a: ["], "is not a valid value"),
    "job's own type": (["--set", "train.lr=fast"], "train.lr must be a number, found 'fast'"),
    "secret": (["--set", "env.HF_TOKEN=hf_abcdefghij"], "env.HF_TOKEN looks like a secret"),
    "no UTF-8": (["--set", "env.A=caf\udce9"], "env.A"),  # as Python reads Latin-1 arguments
    "variable of a key": (["--set", "env.PJRT_DEVICE=CPU"], "device determines PJRT_DEVICE"),
    "cache of a key": (
        ["--set", "neuron.env.NEURON_COMPILE_CACHE_URL=/x"],
        "compile_cache determines NEURON_COMPILE_CACHE_URL: set compile_cache instead",
    ),
    "env name": (["--set", "env.A B=x"], "env.A B: not a valid environment variable name"),
}
NAMES_AND_TIMES = {
    "newline": (["--name", "a\nb"], "job name 'a\\nb': use 1 to 64 letters, digits"),
    "substitution": (["--name", "$(touch x)"], "job name '$(touch x)': use 1 to 64"),
    "slash": (["--name", "../x"], "job name '../x'"),
    "dash": (["--name", "-x"], "job name '-x'"),
    "too long": (["--name", "x" * 65], "use 1 to 64"),
    "no time": (["--time", "tomorrow"], "expected minutes, HH:MM:SS or D-HH:MM:SS"),
    "negative time": (["--time", "-5"], "--time -5"),
    "seconds": (["--time", "0:30"], "--time 0:30: must be at least one minute"),
    "empty days": (["--time", "1-"], "--time 1-: expected"),
    "a minute of 61": (["--time", "25:61:00"], "--time 25:61:00: minutes and seconds after a"),
    "a second of 99": (["--time", "0-0:1:99"], "--time 0-0:1:99: minutes and seconds after a"),
    "more than a year": (["--time", "365-0:0:1"], "at most a year (365-00:00:00)"),
    "many years": (["--time", 99 * "9"], "at most a year (365-00:00:00)"),
    "a year in the profile": (
        ["--set", "slurm.time_min=525601"],
        "slurm.time_min is 525601, which is more than a year: it must be at most 525600",
    ),
    "a year by the plan": (
        ["--set", "steps=99999999999999999"],
        "gpt2_zero1 (xl) would take longer than a year, the longest time limit: pass --time",
    ),
    "endless": (["--time", "UNLIMITED"], "--time UNLIMITED: expected"),
    "own option": (["--sbatch=--nodes=3"], "--sbatch --nodes=3: use --nodes"),
    "own directive": (["--sbatch=--output=x"], "--sbatch --output=x: "),
    "dependency": (["--sbatch=--dependency=1"], "--sbatch --dependency=1"),
    "GPUs twice": (
        ["--time", "60", "--set", "instance_type=p4d.24xlarge", "--sbatch=--gres=gpu:a100:4"],
        "--sbatch --gres=gpu:a100:4: the script has --gpus-per-node=8: use",
    ),
    "GPUs of tasks": (["--sbatch=--gpus-per-task=1"], "use --set slurm.gpus_per_node"),
    "CPUs of GPUs": (["--sbatch=--cpus-per-gpu=1"], "use --set slurm.cpus_per_task"),
    "shared, and whole": (["--sbatch=--oversub"], "the script has --exclusive: use"),
    "time twice": (
        ["--time", "60", "--set", "slurm.time_min=30"],
        "--time and --set slurm.time_min=… contradict each other: omit one of them",
    ),
    "workers twice": (
        ["--workers", "32", "--set", "workers_per_node=8"],
        "--workers and --set workers_per_node=… contradict each other",
    ),
    "short option": (["--sbatch", "-N2"], "expected one long option, such as"),
    "two options": (["--sbatch", "--hold --x"], "expected one long option"),
    "second line": (["--sbatch=--comment=a\n#SBATCH --nodes=9"], "expected one long option"),
    "control character": (["--sbatch=--comment=a\x1bb"], "is not allowed in an #SBATCH line"),
    "partition of two lines": (["--set", "slurm.partition=a\nb"], "is not allowed in an #SBATCH"),
}  # fmt: skip
TABLE = BATCHES_AND_SHAPES | WORDS | NAMES_AND_TIMES
OWN_OPTIONS = [
    "--job-name=x", "--array=1-3", "--wrap=true", "--export=ALL", "--exclusive", "--requeue",
    "--no-requeue", "--cpus-per-task=2", "--chdir=/", "--parsable",
    # getopt takes an unambiguous abbreviation for the whole word
    "--job=x", "--arra=1-3", "--outpu=x", "--chd=/", "--partit=debug",
    # with these sbatch says no job id, does not return, or the job is another controller's
    "--quiet", "--wait", "--clusters=other",
]  # fmt: skip


@pytest.mark.parametrize("what", TABLE)
def test_submit_refuses(refused, what: str) -> None:
    arguments, words = TABLE[what]
    assert words in refused(*SUBMIT, *arguments)


@pytest.mark.parametrize("option", OWN_OPTIONS)
def test_options_of_our_own_cannot_be_passed_through(refused, option: str) -> None:
    assert f"--sbatch {option}: " in refused(*SUBMIT, f"--sbatch={option}")


def test_options_beside_which_the_script_has_none(site, fake_slurm, cli) -> None:
    gpus = ("--set", "instance_type=p4d.24xlarge", "--set", "slurm.gpus_per_node=0")
    assert cli(*SUBMIT, *gpus, "--time=60", "--sbatch=--gres=gpu:8", "--dry-run").code == 0
    shared = ("--set", "slurm.exclusive=false", "--sbatch=--oversubscribe")
    assert cli(*SUBMIT, *shared, "--dry-run").code == 0


def test_the_place_where_an_unknown_cluster_is_named(site, refused, monkeypatch) -> None:
    unknown = "unknown cluster 'locl' (did you mean \"local\"?)"
    plan = ("plan", "toy", "--nodes", "1")
    recipe = site.recipe("batch: {global_batch: 8}\ndefault_cluster: locl\n")
    assert refused(*plan) == f"{site.root}/jobs/toy/recipe.yaml: default_cluster: {unknown}", recipe
    Path("trnslurm.yaml").write_text("cluster: locl\n")
    assert refused("submit", "toy", "--nodes", "1") == f"trnslurm.yaml: {unknown}"
    monkeypatch.setenv("TRNSLURM_CLUSTER", "locl")
    assert refused(*plan) == f"TRNSLURM_CLUSTER: {unknown}"


def test_plan_says_for_what_it_plans_where_nothing_is_chosen(site, cli, monkeypatch) -> None:
    monkeypatch.setattr(choice, "slurm_hint", lambda: (None, False))
    done = cli("plan", "gpt2_zero1", "--nodes", "2")
    would = "here, submit would use --cluster local --preset tiny"
    assert f"Using --cluster trn1 --preset xl, from the recipe; {would}\n" in done.err
    assert "gpt2_zero1 (xl) on trn1.32xlarge" in done.out
    assert cli("plan", "gpt2_zero1", "--nodes", "2", "--cluster", "trn1").err == ""


def test_unknown_recipe_and_cluster(refused) -> None:
    assert refused("submit", "gpt2_zero", "-c", "pc") == (
        "unknown recipe 'gpt2_zero' (did you mean \"gpt2_zero1\"?)"
    )
    assert refused("submit", "gpt2_zero1", "--cluster", "trn11") == (
        "unknown cluster 'trn11' (did you mean \"trn1\"?)"
    )
    assert "; `trnslurm recipes` lists them; " in refused("submit", "zzz", "-c", "pc")
    assert refused("submit", "gpt2_zero1", "-c", "zzz").endswith("`trnslurm clusters` lists them")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["submitt"], "unknown command 'submitt' (did you mean \"submit\"?)"),
        (["sandbox", "up", "mine"], "(mine); a name is an option: --name NAME (trnslurm sandbox"),
        (["frobnicate"], "unknown command 'frobnicate'; see trnslurm --help"),
        (["submit", "x", "--frob"], "--frob"),
        (["submit", "x", "--nodes", "two"], "'two' is not a valid integer"),
        (["status"], "Missing argument 'RUN'"),
        (["logs", "last", "--phase", "compile"], "'compile' is not one of"),
        (["cluster", "detekt"], "detekt"),
    ],
)
def test_usage_errors(refused, arguments: list[str], words: str) -> None:
    error = refused(*arguments, code=2)
    assert words in error
    assert "--help" in error or "did you mean" in error


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("{tmp}/file/runs", "Not a directory: set run_root in the cluster profile"),
        ("{tmp}/a:b", "a colon, a percent sign, a backslash, a control character or a byte that"),
        ("{tmp}/100%", "choose another run_root"),
        ("{tmp}/a\nb", "choose another run_root"),
        ("{tmp}/a\\b", "choose another run_root"),
        ("{tmp}/open", ": run chmod o-w or chmod o+t on it"),
        ("/proc/nowhere/runs", "run root /proc/nowhere/runs: "),
        ("/not-mounted/runs", "/not-mounted does not exist on this host"),
    ],
)
def test_run_root(refused, site, cli, fake_slurm, tmp_path: Path, root: str, words: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    before = set(tmp_path.rglob("*"))
    site.recipe("steps: 3\nbatch: {global_batch: 64}\nslurm: {time_min: 5}\n")
    done = cli("submit", "toy", "-c", "pc", "--set", f"run_root={root.format(tmp=tmp_path)}")
    *_, error = done.err.splitlines()
    assert done.code == 1
    assert error.startswith("error: ") and words in error
    assert fake_slurm.calls("sbatch") == []
    others = {site.root, tmp_path / "slurm"}  # the site, and the calls of the stand-ins
    made = {f for f in set(tmp_path.rglob("*")) - before if not others & {f, *f.parents}}
    assert made == set()
    assert not Path("/not-mounted").exists()


def test_run_root_in_a_home_that_is_not_utf_8(monkeypatch) -> None:
    monkeypatch.setenv("HOME", os.fsdecode(b"/tmp/\xff"))
    with pytest.raises(RunError, match="byte that is not UTF-8"):
        check_run_root(Path("~/runs"))


HINTS = {
    "Slurm is here": (("/usr/bin/srun", True), "this host has Slurm, but no cluster profile is"),
    "Slurm might be here": (
        ("/etc/slurm", False),
        "/etc/slurm suggests that this host has Slurm, but srun",
    ),
}


@pytest.mark.parametrize("what", HINTS)
def test_nothing_is_guessed_where_slurm_may_be(refused, monkeypatch, what: str) -> None:
    hint, words = HINTS[what]
    monkeypatch.setattr(choice, "slurm_hint", lambda: hint)
    error = refused("submit", "gpt2_zero1")
    assert words in error
    assert "--cluster" in error


@pytest.mark.parametrize("command", ["plan", "show", "render"])
def test_other_commands_speak_alike(refused, command: str) -> None:
    assert '(did you mean "tiny"?)' in refused(command, "gpt2_zero1", "-c", "pc", "-p", "tinny")


@pytest.mark.parametrize(
    ("nodes", "words"),
    [("0", "--nodes 0: a job needs at least one node"), ("1,x", "such as --nodes 1,2,4"),
     ("", "such as --nodes 1,2,4"), ("1,,2", "such as --nodes 1,2,4")],
)  # fmt: skip
def test_plan_refuses_odd_node_counts(refused, nodes: str, words: str) -> None:
    assert words in refused("plan", "gpt2_zero1", "-c", "pc", "--nodes", nodes)


def test_plan_by_itself_says_on_which_node_counts_it_cannot_be(site, cli) -> None:
    toy = ("plan", "toy", "-c", "pc")
    site.recipe("batch: {global_batch: 32}\n")
    done = cli(*toy)
    assert (done.code, done.err) == (0, "")
    *_, few, none = done.out.splitlines()
    assert few == (
        "Not on 2, 4 nodes: on 2, global batch 32 at micro-batch 1 is 32 micro-batches per step, "
        "fewer than 2 x 32 workers"
    )
    assert none.startswith("Not on 8, 16 nodes: on 8, --nodes 8 is more than slurm.max_nodes (4): ")
    shown = cli(*toy, "--json")
    assert (shown.code, shown.err) == (0, "")
    assert [row["nodes"] for row in json.loads(shown.out)["refused"]] == [2, 4, 8, 16]

    for asked in ([], ["--json"]):
        done = cli(*toy, "--nodes", "1,2", *asked)
        assert done.code == 1
        assert done.err.startswith("error: 2 nodes: global batch 32 at micro-batch 1 is 32 ")
    site.recipe("batch: {global_batch: 16}\n")
    assert "fewer than 1 x 32 workers; nearest: " in cli(*toy).error


def test_the_preset_that_a_profile_prefers_is_every_commands(site, cli) -> None:
    site.recipe("batch: {global_batch: 8}\nsteps: 9\npresets:\n  xl: {}\n  tiny: {steps: 3}\n")
    said, toy = "Using --preset tiny by default\n", ("toy", "--cluster", "local")
    for command in ("plan", "show", "render", "compile key", "submit --dry-run"):
        done = cli(*command.split(), *toy)
        assert (done.code, done.err.startswith(said)) == (0, True), command
        assert said not in cli(*command.split(), *toy, "--preset", "xl").err
    swept = cli("submit", *toy, "--dry-run", "--sweep", "seed=1,2")
    assert (swept.code, swept.err.count(said)) == (0, 1)
    assert "3 steps" in cli("plan", *toy).out
    assert "steps: 3\n" in cli("render", *toy).out
    assert trnslurm.plan("toy", cluster="local").preset == "tiny"


def test_plan_names_node_counts_without_padding(site, cli) -> None:
    site.recipe("batch: {global_batch: 7}\nworkers_per_node: 1\n")
    notes = [line for line in cli("plan", "toy", "-c", "local").out.splitlines() if "zero" in line]
    assert [line.partition("zero; ")[2] for line in notes] == 2 * ["none with 1 or 7 nodes"]
    site.recipe("batch: {global_batch: 3}\nworkers_per_node: 2\n")
    out = cli("plan", "toy", "-c", "local").out
    assert "1 node: 1 of each step's 4 micro-batches have weight zero; every node count has " in out
