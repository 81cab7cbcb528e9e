"""The command line as users and their scripts know it: a change here is a change for them."""

from __future__ import annotations

import inspect
import os
import re
import shlex
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
from ..stable_files import parts_of

ROOT = Path(__file__).parents[2]
TRNSLURM = (sys.executable, "-m", "trnslurm")
_OF_A_SWEEP = {"--sweep", "--sweep-file", "--at-most", "--halving", "--lowest", "--highest"}


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
    """An argument or option, with its default and choices."""
    if isinstance(parameter, click.Argument):
        several = "..." if parameter.nargs == -1 else ""
        name = f"{str(parameter.name).upper()}{several}"
        return name if parameter.required else f"[{name}]"
    assert isinstance(parameter, click.Option)
    word = "/".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag or parameter.count:
        return word
    choices = parameter.type.choices if isinstance(parameter.type, click.Choice) else ()
    default = parameter.default if isinstance(parameter.default, int | float | str) else ""
    several = "..." if parameter.multiple else ""
    return f"{word}={default}{several}{f' {{{chr(44).join(choices)}}}' if choices else ''}"


def test_every_command_and_option(stable) -> None:
    commands = {"": group, **{name: COMMANDS[name] for name in VERBS}}
    found = {f"trnslurm {n}".strip(): [*map(word_of, c.params)] for n, c in commands.items()}
    assert all(found.values())
    stable.compare("commands.txt", found)


def test_every_json_is_in_the_list_of_keys() -> None:
    """Other tests, which have rich outputs, compare the keys themselves."""
    with_json = {n for n in VERBS if any("--json" in p.opts for p in COMMANDS[n].params)}
    parts = {part.partition(" (")[0] for part in parts_of("json.txt")}
    assert parts == with_json | {"--version"}


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
        words = shlex.split(re.split(r"\s{2,}|\s>>?\s", line)[0])
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
    in_words = {"-m", "--per"}  # as a recipe `-m MODULE`, and as a launcher
    in_words |= {"--each-checkpoint-of", "--every", "--patience"}  # no run comes of it at once
    in_words |= {"--again"}  # of trnslurm.pipeline
    words = {p.opts[-1] for p in command.params} - printing - _OF_A_SWEEP - in_words
    named = {"--set": "settings", "--from": "from_run", "--in": "in_job"}
    expected = {named.get(word, word.lstrip("-").replace("-", "_")) for word in words}
    assert set(inspect.signature(getattr(trnslurm, name)).parameters) == expected


def test_a_sweep_in_python_takes_what_a_submission_takes() -> None:
    alike = {*inspect.signature(trnslurm.submit).parameters} - {
        "compile_for",
        "elastic",
        "chain",
        "rendered",
        "in_job",
    }
    assert {*inspect.signature(trnslurm.sweep).parameters} == alike | {
        *("values", "at_most", "halving", "lowest", "highest"),
    }
