"""Explains a failure by the run's project and plan: a file not copied, a GPU not requested."""

from __future__ import annotations

import glob
import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from trnslurm.contract.files import read_file, read_json
from trnslurm.contract.rundir import NODE_SCRIPT, RunFiles
from trnslurm.devices import DEVICES
from trnslurm.frozen import Frozen
from trnslurm.node.triage.budget import is_spent
from trnslurm.node.triage.releases import packages
from trnslurm.node.triage.words import frames_in

NO_FILE = re.compile(r"No such file or directory: '([^']+)'")
_NO_PARENT = re.compile(r"Parent directory (\S+) does not exist")  # of torch.save
_NODE_SCRIPT_LINE = re.compile(r"^  \S.*\.py\b.*", re.MULTILINE)
_LONGEST_SCRIPT, _LONGEST_LINE = 1 << 20, 1000
# Lines that name a directory to read from, or one to write to.
_READS = re.compile(
    r"(?i)glob|iterdir|listdir|scandir|walk\(|\*|data|input|corpus|source|folder|files"
)
_WRITES = re.compile(r"(?i)\bout|output|result|checkpoint|ckpt|\blogs?\b|save|write|dump|mkdir")
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_SHORTEST_SLIP = 4
# What is imported under another name than its package has.
_OTHER_MODULES = {"sklearn", "yaml", "cv2", "PIL", "matplotlib", "pandas", "scipy", "wandb", "tqdm"}
_QUOTED = re.compile(r"""["']([^"'\s]+)["']""")
_NEEDS_GPU = {
    *("fp16-no-gpu", "fsdp-cpu-only", "gpu-none", "gpu-not-built", "lightning-no-gpu"),
    *("quantization-no-gpu", "torch-without-cuda", "trainer-bf16"),
}
_FOR_CPUS = {
    "trainer-bf16": "--bf16 False, or --use_cpu",
    "fp16-no-gpu": "no mixed precision",
    "quantization-no-gpu": "no quantization",
}


class Missing(Frozen):
    """A file of the user's project that a script misses in the run's copy."""

    cause: str
    fix: str
    link: str = ""
    """The name that `links` must contain, or "" if another path is needed instead."""


def left_out_of(run: Path) -> list[str]:
    """Return the paths of a script's project that its run did not copy, hidden ones last."""
    listed = read_json(RunFiles(run).project_file).get("left_out")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    return sorted(names, key=lambda name: "/." in f"/{name}")


def not_copied(run: Path, lines: Iterable[str]) -> str:
    """Return the path that a script cannot find because its run did not copy it, or "".

    The path is relative to the script's project.
    """
    names = left_out_of(run)
    for line in lines:
        if is_spent():
            break
        if match := NO_FILE.search(line) or _NO_PARENT.search(line):
            path = _in_copy(run, match[1])
            if name := next((n for n in names if path == n or path.startswith(f"{n}/")), ""):
                return name
        if line.startswith("FileNotFoundError: "):  # in a library's own wording
            named = {word.removeprefix("./").rstrip("/") for word in _QUOTED.findall(line)}
            if name := next((n for n in names if n in named), ""):
                return name
        if match := _NO_MODULE.search(line):
            module = match[1].replace(".", "/")
            ours = (name for name in names if _is_module(name, module))
            if name := next(ours, ""):
                return name
    return ""


def missing_of_project(run: Path, lines: Iterable[str]) -> Missing | None:
    """Return the project file that a script misses and the reason, or None."""
    lines = [*lines]
    if name := not_copied(run, lines):
        return _was_not_copied(name, name, left_out_of(run))
    if RunFiles(run).project_file.exists():
        for match in filter(None, map(_NO_MODULE.search, lines)):
            module = match[1]
            # For `a.b`, Python has found a, so only the rest may be misspelled.
            if "." not in module and (meant := _meant(run, module)):
                return Missing(
                    cause=f"there is no module {module}: did you mean {meant}?",
                    fix=f"correct the name in the script, and submit again; if {module} is a "
                    "package that you know, install it",
                )
    for match in filter(None, map(NO_FILE.search, lines)):
        if is_spent():
            break
        if place := _elsewhere(run, path := _in_copy(run, match[1]), lines):
            above = place.removesuffix(f"/{path}")
            return Missing(
                cause=f"{path} is in the project's {above}/, but the script starts in the "
                "directory above",
                fix=f"submit in {above}/ (cd {shlex.quote(above)}), or give the path {place}",
            )
        if _is_beside(run, match[1]):
            return Missing(
                cause=f"{match[1]} is next to the project, but the run has only a copy of the "
                "project",
                fix="submit from the parent directory (cd .., and pass the script's path from "
                "there), so that the copy contains it, or use an absolute path",
            )
    return None


def _is_beside(run: Path, path: str) -> bool:
    """Check whether a script names a file above its own directory, which a copy lacks."""
    if not RunFiles(run).project_file.exists():
        return False
    place = Path(os.path.normpath(run / "work" / path))
    if place.is_relative_to(run / "work"):
        return False
    # {checkpoints} and other places of the run are given as absolute paths.
    return not Path(path).is_absolute() or (
        place.is_relative_to(run.parent) and not place.is_relative_to(run)
    )


def _meant(run: Path, module: str) -> str:
    """Return the known module whose name is almost that of a missing module, or ""."""
    known = {name.replace("-", "_") for name in packages()}
    project = RunFiles(run).code / "project"
    ours = {p.stem for p in (*project.glob("*.py"), *project.glob("*/__init__.py"))}
    ours |= {p.parent.name for p in project.glob("*/__init__.py")} - {"__init__"}
    known |= _OTHER_MODULES
    # Such names belong to packages that extend another: torchx, tensorboardX, pickle5.
    follows = re.fullmatch(r".*[xX\d]", module)
    if module in known or len(module) < _SHORTEST_SLIP or follows:
        return ""
    # Shorter names are close to real packages: typer and types, ujson and json.
    standard = getattr(sys, "stdlib_module_names", ())  # new in Python 3.10
    standard = [name for name in standard if len(name) > _SHORTEST_SLIP + 1]
    names = [*sorted(ours), *sorted(known), *sorted(standard)]
    return next((name for name in names if name != module and _is_slip(module, name)), "")


def _is_slip(wrong: str, right: str) -> bool:
    """Check whether one letter is added, missing or different, or two neighbors are swapped."""
    short, long = sorted((wrong, right), key=len)
    if len(long) - len(short) == 1:
        return any(long[:at] + long[at + 1 :] == short for at in range(len(long)))
    differ = [at for at, pair in enumerate(zip(wrong, right)) if len({*pair}) > 1]
    if len(wrong) != len(right) or len(differ) > 2:
        return False
    first, last = differ[0], differ[-1]
    swapped = last == first + 1 and (wrong[first], wrong[last]) == (right[last], right[first])
    return len(differ) == 1 or swapped


def named_by_script(run: Path, lines: tuple[str, ...]) -> Missing | None:
    """Return the first path that the script names and the copy lacks, or None.

    The script is the traceback's. If there is none, it is the script that node.sh starts, with its
    arguments.
    """
    if not (names := left_out_of(run)):
        return None
    command = _NODE_SCRIPT_LINE.findall(_text_of(run / NODE_SCRIPT))
    inside = (file.rpartition(f"{run.name}/work/") for file, _ in frames_in(lines))
    files = [name for _, here, name in inside if here]
    files = files or re.findall(r"(?<![\w./-])[\w./-]+\.py\b", "\n".join(command))
    code = [_text_of(run / "work" / file) for file in dict.fromkeys(files)]
    said = [line[:_LONGEST_LINE] for text in code for line in text.split("\n")]
    words = [word for line in command for word in re.findall(r"(?<![\w-])--?[\w-]+[ =]\S+", line)]
    reading = [x for x in (*said, *words) if _READS.search(x) and not _WRITES.search(x)]
    for name in names:
        if is_spent():
            break
        path = re.compile(
            rf"""(?<!\[)(?<!get\()["' =](\./)?{re.escape(name)}(/[^\s"']*)?(["']|$)"""
        )
        if any(path.search(line) for line in reading):
            return _was_not_copied(name, f"{name}, which the script names,", names)
    return None


def needs_gpu(run: Path, name: str) -> tuple[str, str] | None:
    """Return the cause and fix if a missing GPU ended a run that computes on CPUs."""
    device = DEVICES.get(str(read_json(RunFiles(run).plan_file).get("device")))
    if name not in _NEEDS_GPU or not (device and device.on_host):
        return None
    usual = "gloo instead of nccl, no torch.cuda.set_device, no device_ids"
    return (
        "the script needs a GPU, but this run computes on CPUs",
        "submit it to nodes with GPUs (--cluster, slurm.gpus_per_node), or change it for CPUs: "
        f"{_FOR_CPUS.get(name, usual)}",
    )


def _was_not_copied(name: str, subject: str, left_out: list[str]) -> Missing:
    why = "it is hidden" if name.rpartition("/")[2].startswith(".") else ".gitignore lists it"
    link = _with_siblings(name, left_out)
    return Missing(
        cause=f"{subject} was not copied with the project, because {why}",
        fix=f"submit again with --set {shlex.quote(f'links=[{link}]')}, which links to it",
        link=link,
    )


def _in_copy(run: Path, path: str) -> str:
    """Return a path relative to the project, if it is in the run's copy."""
    return path.removeprefix("./").rpartition(f"{run.name}/work/")[2]


def _with_siblings(name: str, left_out: list[str]) -> str:
    """Return a path, or its directory if other files there were not copied either."""
    above = PurePosixPath(name).parent
    hidden = PurePosixPath(name).name.startswith(".")
    beside = [n for n in left_out if PurePosixPath(n).parent == above and n != name]
    return str(above) if beside and not hidden and str(above) != "." else name


def _elsewhere(run: Path, path: str, lines: Iterable[str]) -> str:
    """Return the project's path of a file that its script expects in its own directory.

    The run starts the script in the project's top directory.
    """
    name = PurePosixPath(path).name
    if not name or path.startswith("/") or ".." in path:
        return ""
    project = RunFiles(run).code / "project"
    found = (file.relative_to(project).as_posix() for file in project.rglob(glob.escape(name)))
    for place in found:
        above = place.removesuffix(f"/{path}")
        if above != place and any(f"{run.name}/work/{above}/" in line for line in lines):
            return place
    return ""


def _text_of(file: Path) -> str:
    try:
        return read_file(file, _LONGEST_SCRIPT).decode(errors="replace")
    except OSError:
        return ""


def _is_module(name: str, module: str) -> bool:
    """Check whether a project path is this module, or a package that contains it."""
    path = name.removeprefix("src/").removesuffix(".py")
    return module == path or module.startswith(f"{path}/")
