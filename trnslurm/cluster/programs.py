"""Runs our own programs with the cluster's Python on this host: export and data preparation."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from trnslurm.cluster.python import interpreter, run_python
from trnslurm.config.load import read_cluster
from trnslurm.config.schema import Cluster, Config
from trnslurm.config.search import read_yaml
from trnslurm.contract.checkpoints import newest_checkpoint, saves_in
from trnslurm.contract.files import read_json
from trnslurm.contract.rundir import PLAN, RunFiles
from trnslurm.errors import RunError, TrnslurmError
from trnslurm.plan.spec import make_spec
from trnslurm.records.foreign import refuse_foreign, refuse_writable_code
from trnslurm.records.run import RunDir
from trnslurm.render.bundle import Bundle, snapshot
from trnslurm.render.job import plan_data
from trnslurm.schedulers.choice import scheduler_of

_PACKAGE = Path(__file__).resolve().parent.parent
_EXPORTS_WITH = ("torch", "transformers", "safetensors")
_PREPARES_WITH = ("numpy", "tokenizers")
_HOME = re.compile(r"^((?:--[\w-]+=)?)~/")


def option_words(options: Mapping[str, object]) -> list[str]:
    """Return options as arguments of a program, without empty values."""
    return [f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items() if v]


def export_quietly(run: RunDir, options: Sequence[str], *, say: Callable[[str], None]) -> Path:
    """Export a run's checkpoint without printing; return the folder, and `say` warnings."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = export(run, [*options, "--json"], streams=(out, err))
        out.seek(0)
        err.seek(0)
        answer, words = (file.read().decode(errors="replace") for file in (out, err))
    lines = words.strip().splitlines()
    if code:
        errors = [line for line in lines if line.startswith("error: ")] or lines[-1:]
        raise RunError(
            "; ".join(errors).removeprefix("error: ")
            or f"its export.py failed with exit code {code}"
        )
    for line in lines:
        if line.startswith("warning: "):
            say(line)
    try:
        return Path(json.loads(answer.strip().splitlines()[-1])["directory"])
    except (ValueError, LookupError, TypeError):
        raise RunError(
            f"{run.name}: its export.py does not print a directory with --json"
        ) from None


def export(
    run: RunDir, options: Sequence[str] = (), *, streams: tuple[IO[bytes], IO[bytes]] | None = None
) -> int:
    """Run the export script in a run's code with these options; return its exit code.

    The script prints to the terminal, or to `streams` instead of stdout and stderr.
    """
    refuse_foreign(run.path, "export")
    refuse_writable_code(run.path)
    record = run.record()
    if run.project_file.exists():
        raise RunError(f"{run.name}: {_saved_by_script(run)}")
    saved = read_yaml(run.config_file).get("config")
    if not isinstance(saved, dict):
        raise RunError(f"{run.config_file} is damaged: it has no config")
    cluster = read_cluster(saved, str(run.config_file))
    return _run_script(cluster, run, record.recipe, options, whose=run.name, streams=streams)


def _saved_by_script(run: RunDir) -> str:
    """Return why there is nothing to export: a custom script saved in its own format."""
    newest = newest_checkpoint(run)
    of_trainer = saves_in(run).glob("checkpoint-*")  # as transformers' Trainer names them
    numbered = {int(m[1]): p for p in of_trainer if (m := re.search(r"-(\d+)$", p.name))}
    places = [*([newest] if newest else []), *(numbered[n] for n in sorted(numbered)[::-1])]
    for place in (*places, saves_in(run)):
        if _is_hugging_face(place):
            return (
                f"there is nothing to export: {place} is already a Hugging Face model for "
                "from_pretrained"
            )
    where = places[0] if places else saves_in(run)
    return (
        f"export converts only checkpoints of recipes: {where} is in the custom script's own "
        "format, so load it with the script's code"
    )


def _is_hugging_face(directory: Path) -> bool:
    """Check whether a directory has a model's or adapter's configuration and all weights."""
    if not any((directory / f"{kind}config.json").is_file() for kind in ("", "adapter_")):
        return False
    parts: set[str] = set()
    for index in directory.glob("*.index.json"):
        weights = read_json(index).get("weight_map")
        parts |= {*map(str, weights.values())} if isinstance(weights, dict) else set()
    whole = [*directory.glob("*model*.safetensors"), *directory.glob("*model*.bin")]
    return bool(whole) and all((directory / part).is_file() for part in parts)


def export_file(config: Config, file: Path, options: Sequence[str]) -> int:
    """Export a parameter file without a run, as the configured model."""
    if not file.is_file():
        raise RunError(f"{file}: no such file")
    if file.suffix != ".pt":
        raise RunError(f"{file}: with --recipe, RUN must be a .pt file")
    spec = make_spec(config, 1, need_time=False)
    recipe = config.recipe_name
    files = snapshot(config)
    files[PLAN] = json.dumps(plan_data(spec)).encode()
    with tempfile.TemporaryDirectory(prefix="trnslurm-") as directory:
        here = Path(directory)
        Bundle(files=files).write(here)
        words = [f"--from={file.absolute()}", *options]
        return _run_script(config.cluster, RunFiles(here), recipe, words, whose=recipe)


def _run_script(
    cluster: Cluster,
    files: RunFiles,
    recipe: str,
    options: Sequence[str],
    *,
    whose: str,
    streams: tuple[IO[bytes], IO[bytes]] | None = None,
) -> int:
    script = files.code / "jobs" / recipe / "export.py"
    if not script.is_file():
        raise RunError(f"{whose} cannot be exported, because {recipe} has no export.py")
    return run_python(
        cluster,
        [str(script), str(files.plan_file), *options],
        cwd=files.path,
        pythonpath=files.python_path,
        modules=_EXPORTS_WITH,
        streams=streams,
    )


def prepare_here(
    cluster: Cluster,
    arguments: Sequence[str],
    *,
    otherwise: str,
    streams: tuple[IO[bytes], IO[bytes]] | None = None,
) -> int:
    """Run `trnslurm.prepare` with the cluster's Python until it ends; return its exit code.

    `otherwise` is the advice if this host does not have the cluster's Python.
    """
    python = interpreter(cluster)
    if python.startswith("/") and not Path(python).exists():
        raise TrnslurmError(f"the cluster's Python, {python}, is not on this host: {otherwise}")
    home = scheduler_of(
        cluster
    ).home()  # the local cluster's ~ is our own home, so the program expands it
    arguments = [_HOME.sub(lambda found: f"{found[1]}{home}/", word) for word in arguments]
    return _run_room(cluster, "prepare", arguments, _PREPARES_WITH, streams)


def look_into(cluster: Cluster, path: str, splits: Sequence[str]) -> Mapping[str, Any]:
    """Return what `trnslurm.datasets` finds at a path for each split; empty if it finds nothing.

    It is an `error` if the data is damaged or lacks a split. Raise a TrnslurmError if this host
    cannot look.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _run_room(cluster, "datasets", [path, *splits], ("numpy",), (out, err))
        out.seek(0)
        err.seek(0)
        answer, words = (file.read().decode(errors="replace") for file in (out, err))
    try:
        found = json.loads(answer.strip().splitlines()[-1]) if not code else None
    except (ValueError, IndexError):
        found = None
    if not isinstance(found, dict):
        raise TrnslurmError((words.strip().splitlines() or [answer])[-1].removeprefix("error: "))
    return found


def _run_room(
    cluster: Cluster,
    room: str,
    arguments: Sequence[str],
    modules: Sequence[str],
    streams: tuple[IO[bytes], IO[bytes]] | None,
) -> int:
    """Run a room's program with the cluster's Python.

    That Python imports our package, but no other package from our site-packages, which are for
    another interpreter.
    """
    with tempfile.TemporaryDirectory(prefix="trnslurm-") as directory:
        here = Path(directory)
        (here / _PACKAGE.name).symlink_to(_PACKAGE)
        words = ["-m", f"{_PACKAGE.name}.{room}", *arguments]
        return run_python(
            cluster, words, cwd=here, pythonpath=here, modules=modules, streams=streams
        )
