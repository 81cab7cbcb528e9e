"""A site's own templates, which extend trnslurm's: as docs/templates.md shows, on any scheduler."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trnslurm.config.load import resolve
from trnslurm.config.search import Workspace
from trnslurm.plan.data import Own, make_data_job
from trnslurm.render.job import render_data_job

PAGE = Path(__file__).parents[2] / "docs/templates.md"
MODULE = """\
{% extends "trnslurm/batch.sbatch.j2" %}
{% block environment %}
{{ super() -}}
module load it's
{% endblock %}
"""


def examples() -> list[tuple[str, str, list[str], list[str]]]:
    """Return each template of the page: its file, its text, and the command and lines below it."""
    found = []
    indented = [line[4:] for line in PAGE.read_text().splitlines() if line.startswith("    ")]
    for block in "\n".join(indented).split("$ cat ")[1:]:
        template, _, rendered = block.partition("$ trnslurm ")
        file, _, text = template.partition("\n")
        words, *lines = rendered.partition("\n$ ")[0].splitlines()
        found.append((file, text, shlex.split(words), lines))
    return found


@pytest.mark.parametrize(("file", "text", "words", "lines"), examples())
def test_the_page(cli, tmp_path, monkeypatch, file, text, words, lines) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(*words[: words.index("--path")], "-o", "before").ok
    Path(file).parent.mkdir(parents=True)
    Path(file).write_text(text)
    done = cli(*words)
    assert (done.code, re.findall(r"(?m)^[-+].*", done.out)) == (1, lines)


def test_the_page_has_modules_options_and_efa() -> None:
    assert [file.partition("/")[0] for file, *_ in examples()] == ["modules", "account", "efa"]


def test_every_script_has_the_line(site, cli) -> None:
    """On Slurm, on this machine, and in a preparation of data, in its place."""
    site.write("templates/batch.sbatch.j2", MODULE)
    site.recipe("batch: {global_batch: 64}\nprecompile: never\ndata: {path: toy, text: t.txt}\n")
    site.write("jobs/toy/t.txt", "text\n")
    site.profile("here", scheduler="local", instance_type="local", device="cpu", slurm={})
    assert cli("render", "toy", "--cluster", "pc", "--time", "60", "-o", "slurm").ok
    assert cli("render", "toy", "--cluster", "here", "-o", "local").ok
    workspace = Workspace.discover([str(site.root)])
    job = make_data_job(resolve(workspace, "toy", cluster="pc"), Own())
    data = render_data_job(job, workspace.template_dirs()).files["prepare.sbatch"].decode()
    scripts = [Path(name).read_text() for name in ("slurm/train.sbatch", "local/train.sh")]
    for text in (*scripts, data):
        assert text.count("\nmodule load it's\n") == 1
        assert text.index("--- Environment") < text.index("module load") < text.index("--- The run")


def test_a_file_of_a_subject(site, cli) -> None:
    site.recipe()
    site.write(
        "templates/device/neuron.j2", '{% include "trnslurm/device/neuron.j2" %}\nexport A=1\n'
    )
    assert cli("render", "toy", "--cluster", "pc", "-o", "out").ok
    script = Path("out/train.sbatch").read_text()
    assert script.index("export NEURON_FUSE") < script.index("\nexport A=1\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% block enviroment %}", 'has no block enviroment (did you mean "environment"?)'),
        ("{% block zzz %}", "has no block zzz; its blocks: plan, resources, closed, "),
        ("{% block variables %}{{ enviroment }}", "4: 'enviroment' is undefined"),
        ("{% block variables %}{{ network.efs }}", "has no attribute 'efs'"),
        ("{% block device %}{% include 'device/gpu.j2' %}", "template device/gpu.j2 was not found"),
    ],
)
def test_a_name_that_there_is_not(site, cli, text: str, words: str) -> None:
    site.recipe()
    head = '{% extends "trnslurm/batch.sbatch.j2" %}\n{# ours #}\n\n'
    site.write("templates/batch.sbatch.j2", f"{head}{text}\n{{% endblock %}}\n")
    error = cli("render", "toy", "--cluster", "pc").error
    assert words in error and error.startswith(f"{site.root}/templates/batch.sbatch.j2") == (
        "not found" not in words
    )
