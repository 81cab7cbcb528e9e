"""render: write the files that submit would run. Works on any host."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from trnslurm.api.arguments import (
    JobArguments,
    PathLike,
    PythonConsole,
    file_name,
    flag,
    options_of,
    takes_job,
)
from trnslurm.render.bundle import Bundle
from trnslurm.submission.bundles import make_bundle, write_bundle


@takes_job(JobArguments)
def render(
    recipe: PathLike,
    *,
    nodes: int | str = 1,
    output: PathLike | None = None,
    force: bool = False,
    **job: Unpack[JobArguments],
) -> Bundle:
    """Return the files that submit would run, and write them to a directory if one is given.

    The arguments are the options of `trnslurm render`. See docs/python.md.
    """
    options = options_of(recipe, nodes, job)
    directory = None if output is None else Path(file_name("output", output))
    replace = flag("force", force)
    bundle = make_bundle(options, PythonConsole())
    if directory is not None:
        write_bundle(bundle, directory, force=replace)
    return bundle
