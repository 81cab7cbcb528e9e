"""Staging of the environment: what is refused before anything is queued, and what scripts get."""

from __future__ import annotations

from pathlib import Path

import pytest

SUBMIT = ("submit", "toy", "--cluster", "pc", "--nodes", "2", "--time", "60", "--dry-run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage_python": "scratch"}, "stage_python is 'scratch': it must be an absolute path"),
        ({"stage_python": "~/scratch"}, "stage_python is '~/scratch': it must be an absolute path"),
        ({"stage_python": ""}, "stage_python is empty"),
        ({"python": "python3"}, "stage_python is set, but python is 'python3': it must be the"),
        (
            {"container": {"image": "a:1"}, "compile_cache": "/fsx/compiled"},
            "with container.image workers use the image's Python",
        ),
        ({"python": "/bin/sh"}, "/bin/sh is not in a venv or conda environment: set python: to"),
    ],
)
def test_refused(site, fake_slurm, cli, changes: dict[str, object], words: str) -> None:
    site.recipe()
    site.profile(**{"stage_python": "/scratch", **changes})
    done = cli(*SUBMIT)
    assert done.code == 1
    assert words in done.error
    site.profile(**{**changes, "stage_python": None})
    assert cli(*SUBMIT).code == 0


@pytest.mark.parametrize("sign", ["pyvenv.cfg", "conda-meta"])
def test_an_environment_here_is_accepted(site, fake_slurm, cli, tmp_path: Path, sign: str) -> None:
    site.recipe()
    python = tmp_path / "environment/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/sh")
    site.profile(python=str(python), stage_python="/scratch")
    assert "is not in a venv or conda environment" in cli(*SUBMIT).error
    (python.parents[1] / sign).mkdir()
    assert cli(*SUBMIT).code == 0


def test_an_archive_is_kept_where_the_jobs_own_home_is(site, cli, tmp_path: Path) -> None:
    """The program expands ~, as a quoted one stays as it is in bash."""
    site.recipe()
    site.profile(stage_python="/scratch", run_root="~/my runs", preflight=False)
    cli("render", "toy", "--cluster", "pc", "--nodes", "2", "-o", str(tmp_path / "out"))
    script = (tmp_path / "out/train.sbatch").read_text()
    assert "-m trnslurm.node.staging pack '~/my runs')" in script
    assert 'unpack "$TRNSLURM_ARCHIVE" /scratch)' in (tmp_path / "out/node.sh").read_text()


def test_graphs_keep_their_key(graphs, cli) -> None:
    usual = graphs.facts(cli, "toy", "--nodes", "2")
    graphs.profile(stage_python="/scratch")
    assert graphs.facts(cli, "toy", "--nodes", "2") == usual
