"""The command line as users and their scripts know it: a change here is a change for them."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import trnslurm
from trnslurm import __version__
from trnslurm.cli import _COMMANDS
from trnslurm.cli import cli as group

from ..processes import run_process

ROOT = Path(__file__).parents[2]
TRNSLURM = (sys.executable, "-m", "trnslurm")
CONFIG = "--path -c/--cluster -p/--preset --set"
SPEC = (
    f"{CONFIG} --spares --workers --from --time --name --launcher --sbatch --env --notify "
    "--allow-idle"
)
SURFACE = {
    "recipes": "RECIPE -p/--preset --path --json",
    "show": f"RECIPE ARGUMENTS {SPEC} --json",
    "plan": f"RECIPE ARGUMENTS -n/--nodes {SPEC} --json",
    "render": f"RECIPE ARGUMENTS -n/--nodes {SPEC} -o/--output --force --diff",
    "submit": (
        f"RECIPE ARGUMENTS -n/--nodes {SPEC} --precompile --elastic --sweep --sweep-file "
        "--at-most --chain --rendered --after --in --dry-run "
        "-y/--yes -f/--follow --detach --json"
    ),
    "new": "NAME ARGUMENTS --from --launcher --force",
    "data fetch": f"RECIPE {CONFIG} --force --revision --column --checkpoint",
    "data prepare": (
        f"RECIPE {CONFIG} --text/--input --output --tokenizer --holdout --processes --force --json "
        "--document-per --document-start --column --end-of-text --seq-len --wikiextractor "
        "--wrapped --max-pred --masked-lm-prob --whole-words --dupe-factor --seed --shards "
        "--test-shards --eval --task --text-column --label-column --label --submit -f/--follow "
        "--dry-run"
    ),
    "data verify": f"TARGET {CONFIG}",
    "runs": ("SWEEP -a/--all --state --recipe --since --sort --limit --csv --path --json"),
    "status": "RUN --lowest --highest --path --json",
    "logs": "RUN --node --phase --batch -f/--follow -n/--lines --path",
    "metrics": "RUN -n/--lines --plot --to --project -f/--follow --path --json",
    "top": "RUN --every -a/--all --path",
    "compare": "RUNS --path --json",
    "note": "RUN TEXT --clear --path",
    "keep": "RUNS --undo --path",
    "rm": "RUNS --checkpoints --older-than --max-size --dry-run -y/--yes --path --json",
    "exporter": "--port --host -o/--output --every --dashboard --path",
    "report": "RUNS --since --by -o/--output --png --path --json",
    "triage": "RUN --phase --attempt --path --json",
    "cancel": "RUN --now --path --json",
    "exec": "RUN --node COMMAND --path",
    "usage": "RUN --path --json",
    "profile": "RUN --steps --workers --path --json",
    "stacks": "RUN --full --path --json",
    "doctor": "RUN -c/--cluster -n/--nodes --timeout --run --report --path --json",
    "export": (
        "RUN --step -o/--output --format --dtype --tokenizer --force --recipe -p/--preset "
        "-c/--cluster --path --json"
    ),
    "resume": (
        "RUN -n/--nodes --stop-at --set -c/--cluster --notify --path -f/--follow --detach --json"
    ),
    "watch": "RUN --resume --every --max --path",
    "compile key": f"RECIPE -n/--nodes {SPEC} --explain --diff --json",
    "compile status": "--path -c/--cluster --json",
    "compile verify": "KEYS --path -c/--cluster",
    "compile gc": "--older-than --max-size --dry-run -y/--yes --path -c/--cluster",
    "clusters": "--path --json",
    "cluster detect": "--partition --write --name --bin-dir --dump --from --json",
    "reconnect": "--forget",
    "env check": "--path -c/--cluster --timeout --json",
    "sandbox up": (
        "--name -n/--nodes --like --accounting --set --neuron-stand-ins --slurm --users --python "
        "--owner -q/--quiet"
    ),
    "sandbox down": "--name --all",
    "sandbox list": "--json",
    "sandbox status": "--name --json",
    "sandbox env": "--name --unset",
    "sandbox exec": "--name --node --user COMMAND",
    "sandbox fault": "--name FAULT",
    "completion": "SHELL",
}
_OF_A_SWEEP = {"--sweep", "--sweep-file", "--at-most"}
SANDBOX_VERBS = ("up", "down", "status", "env", "exec", "fault")
DEFAULTS = {
    ("plan", "nodes"): "1,2,4,8,16",
    ("render", "nodes"): 1,
    ("submit", "nodes"): 1,
    ("compile key", "nodes"): 1,
    ("logs", "node"): 0,
    ("logs", "lines"): 100,
    ("metrics", "lines"): 20,
    ("exec", "node"): 0,
    ("watch", "every"): "30s",
    ("report", "by"): "recipe",
    ("profile", "steps"): 3,
    ("profile", "workers"): "0",
    ("exporter", "host"): "127.0.0.1",
    ("top", "every"): 5.0,
    ("watch", "most"): 3,
    ("export", "format"): "hf",
    ("export", "dtype"): "float32",
    ("doctor", "timeout"): 600.0,
    ("env check", "timeout"): 600.0,
    ("sandbox up", "like"): "trn1.32xlarge",
    ("sandbox up", "users"): 0,
    **{(f"sandbox {verb}", "name"): "sandbox" for verb in SANDBOX_VERBS},
}


def walk(command: click.Command = group, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command by its full name, groups included."""
    if name:
        yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            below = command.get_command(context, word)
            assert below is not None
            yield from walk(below, f"{name} {word}".strip())


COMMANDS = dict(walk())
VERBS = [name for name, command in COMMANDS.items() if not isinstance(command, click.Group)]


def word_of(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option):
        return "/".join([*parameter.opts, *parameter.secondary_opts])
    return str(parameter.name).upper()


def test_every_command_and_option() -> None:
    found = {name: " ".join(map(word_of, COMMANDS[name].params)) for name in VERBS}
    assert found == SURFACE


def test_defaults() -> None:
    found = {
        (name, p.name): p.default
        for name in VERBS
        for p in COMMANDS[name].params
        if isinstance(p, click.Option) and isinstance(p.default, int | float | str)
        if not p.is_flag
    }
    assert found == DEFAULTS


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_has_an_example(cli, name: str) -> None:
    done = cli(*name.split(), "--help")
    assert (done.code, done.err) == (0, "")
    assert "Example:" in done.out
    assert f"trnslurm {name}".strip() in done.out.partition("Example:")[2]


def test_help_of_data_prepare_groups_the_options_by_recipe(cli) -> None:
    text = cli("data", "prepare", "--help").out
    places = [
        text.index(word) for word in ("Options:", "--force", "For recipes that", "--max-pred")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("name", VERBS)
def test_examples_in_the_help_parse(name: str) -> None:
    """Each example line is one that click accepts, with the options that it has today."""
    text = COMMANDS[name].help or ""
    lines = re.findall(r"^ *trnslurm (.*)$", text.partition("Example:")[2], re.MULTILINE)
    assert lines
    for line in lines:
        words = re.split(r"\s{2,}|\s>>?\s", line)[0].split()
        assert " ".join(words).startswith(name), line
        COMMANDS[name].make_context(name, words[len(name.split()) :])


@pytest.mark.parametrize("name", VERBS)
def test_documented(name: str) -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert any(f"trnslurm {name}" in page.read_text(encoding="utf-8") for page in pages)


@pytest.mark.parametrize("name", VERBS)
def test_every_option_has_help(name: str) -> None:
    for parameter in COMMANDS[name].params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


def test_version_and_no_arguments(run_cli) -> None:
    done = run_cli("--version")
    assert (done.code, done.out, done.err) == (0, f"trnslurm {__version__}\n", "")
    bare = run_cli()
    assert bare.code == 2
    assert "Commands:" in bare.out + bare.err


def test_every_command_is_named_in_the_overview(cli) -> None:
    out = cli("--help").out.partition("Commands:")[2]
    assert re.findall(r"^  ([a-z]+)", out, re.MULTILINE) == [
        name for name in COMMANDS if " " not in name
    ]


def test_the_overview_says_what_each_command_says() -> None:
    for name, (_, what) in _COMMANDS.items():
        text = (COMMANDS[name].help or "").partition("\n\n")[0]
        assert " ".join(text.split()) == what


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["--help"], {}),
        (["--version"], {}),
        (
            [],
            {"_TRNSLURM_COMPLETE": "bash_complete", "COMP_WORDS": "trnslurm s", "COMP_CWORD": "1"},
        ),
    ],
)  # fmt: skip
def test_a_word_imports_no_command(words: list[str], environ: dict[str, str]) -> None:
    program = (
        "import sys\nfrom trnslurm.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "finally:\n    print(sorted(m for m in sys.modules if m.startswith('trnslurm')))"
    )
    done = run_process(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )
    found = done.ok.splitlines()[-1]
    assert found == str(["trnslurm", "trnslurm.cli", "trnslurm.errors"])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(cli, shell: str) -> None:
    done = cli("completion", shell)
    assert done.code == 0
    assert "_TRNSLURM_COMPLETE" in done.out
    assert ("compopt -o nospace" in done.out) == (shell == "bash")  # after KEY=


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("trnslurm su", {"submit"}),
        ("trnslurm submit gpt2", {"gpt2_zero1"}),
        ("trnslurm submit gpt2_zero1 --cluster p", {"pc", "p4d", "p4de", "p5", "p5en"}),
        ("trnslurm submit gpt2_zero1 --preset ti", {"tiny"}),
        ("trnslurm status 2026", {"20260101-000000-gpt"}),
        ("trnslurm status la", {"last"}),
        ("trnslurm submit bert_pretrain --from 2026", {"20260101-000000-gpt"}),
        ("trnslurm submit no_such_recipe --preset ", set()),
        ("trnslurm submit gpt2_zero1 --set train.sch", {"train.schedule="}),
        ("trnslurm show bert_pretrain --set train.max_", {"train.max_pred=", "train.max_norm="}),
        ("trnslurm plan gpt2_zero1 --set slurm.time", {"slurm.time_min="}),
        ("trnslurm plan gpt2_zero1 --set precision=b", {"precision=bf16"}),
        (
            "trnslurm plan llama3_clm --set train.optimizer=",
            {"train.optimizer=adamw", "train.optimizer=sgd"},
        ),
        ("trnslurm plan no_such_recipe --set train.", set()),
        ("trnslurm submit gpt2_zero1 --env _TRNSLURM_COMP", {"_TRNSLURM_COMPLETE"}),
    ],
)
def test_completion_knows_our_names(
    make_run, cli, monkeypatch, words: str, found: set[str]
) -> None:
    make_run()
    monkeypatch.setenv("_TRNSLURM_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    done = cli()
    assert {line.partition(",")[2] for line in done.out.split()} == found
    assert done.err == ""


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (">&-", 0, ""),
        (">&$WITHOUT_READER", 1, ""),
        (">/dev/full", 1, "error: output: No space left on device\n"),
    ],
)
@pytest.mark.parametrize("command", ["render gpt2_zero1 -c pc", "runs --csv", "logs last"])
def test_output_that_cannot_be_written_gives_no_traceback(
    make_run, site, command: str, output: str, code: int, said: str
) -> None:
    run = make_run(states={"train": [{"state": "COMPLETED"}]})
    run.node_log("train", 1, 0).write_text("line\n")
    read, write = os.pipe()
    os.close(read)
    environment = {"PYTHONPATH": str(ROOT), "WITHOUT_READER": str(write), "PYTHONUNBUFFERED": ""}
    try:
        done = subprocess.run(
            ["bash", "-c", f'exec "$@" 2>&1 {output}', "-", *TRNSLURM, *command.split()],
            env={**os.environ, **environment}, pass_fds=[write], stdout=subprocess.PIPE, text=True,
            timeout=600, check=False,
        )  # fmt: skip
    finally:
        os.close(write)
    assert (done.returncode, done.stdout) == (code, said)


@pytest.mark.parametrize("name", ["plan", "render", "submit", "resume", "cancel", "runs"])
def test_python_takes_what_the_command_takes(name: str) -> None:
    """By the same names, less what is about printing and asking."""
    command = group.get_command(click.Context(group), name)
    assert command
    printing = {"--json", "--diff", "--dry-run", "--yes", "--follow", "--detach", "--csv"}
    words = {p.opts[-1] for p in command.params} - printing - _OF_A_SWEEP
    named = {"--set": "settings", "--from": "from_run", "--in": "in_job"}
    expected = {named.get(word, word.lstrip("-").replace("-", "_")) for word in words}
    assert set(inspect.signature(getattr(trnslurm, name)).parameters) == expected


def test_a_sweep_in_python_takes_what_a_submission_takes() -> None:
    alike = {*inspect.signature(trnslurm.submit).parameters} - {
        "elastic",
        "chain",
        "rendered",
        "in_job",
    }
    assert {*inspect.signature(trnslurm.sweep).parameters} == alike | {"values", "at_most"}
