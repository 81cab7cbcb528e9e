"""Who may import whom: the arrows between the parts of trnslurm, read from the sources."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trnslurm

from .processes import run_process

PACKAGE = Path(trnslurm.__file__).parent
JOBS = Path(__file__).parents[1] / "jobs"
HEAVY = {"torch", "torch_xla", "transformers", "numpy"}


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file) for file in PACKAGE.rglob("*.py")}


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it; `from x import y` gives x.y too."""
    package = file.relative_to(PACKAGE.parent).parent.parts if PACKAGE in file.parents else ()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def modules_behind(file: Path) -> set[str]:
    """The modules of trnslurm that a file needs at run time, not for the checker of types alone."""
    found = set()
    left: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{file}: a relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole
            found |= {node.module} if whole - MODULES else set()  # a name in it, not a module
    return found & MODULES


def ours(file: Path) -> set[str]:
    """The parts of trnslurm that a file imports; for node and prepare, the room too."""
    names = [name.split(".")[1:] for name in imports(file) if name.split(".")[0] == "trnslurm"]
    outside = {part for part in ("node", "prepare") if PACKAGE / part not in file.parents}
    return {
        ".".join(words[:2]) if words[0] in outside else words[0]
        for words in names
        if words and words[0] != "__version__"
    }


def foreign(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(file)} - {"trnslurm"}


def files(*parts: str) -> list[Path]:
    """The sources of these parts of the package."""
    found = []
    for part in parts:
        directory = PACKAGE / part
        found += sorted(directory.rglob("*.py")) if directory.is_dir() else [PACKAGE / f"{part}.py"]
    assert found
    return found


PARTS = sorted({f.relative_to(PACKAGE).parts[0].removesuffix(".py") for f in PACKAGE.rglob("*.py")})
# The launcher's floors, from the ground up: a room imports only rooms below it.
FLOORS = [
    "frozen",
    "devices",
    "contract",
    "tracing",
    "pace",
    "ddp_pace",
    "calls",
    "__init__",
    "errors",
    "console",
    "declared",
    "config",
    "adopt",
    "records",
    "slurm",
    "schedulers",
    "plan",
    "render",
    "runs",
    "cluster",
    "submission",
    "health",
    "api",
    "report",
    "trackers",
    "top",
    "remote",
    "cli",
    "__main__",
]
# What stands beside the launcher, and what of ours it may import.
BESIDE = {
    "node": {"contract", "devices", "frozen"},  # programs on the nodes
    "mirror": {"contract"},  # copies in S3
    "datasets": {"contract", "mirror"},  # what other libraries wrote; for any script
    "samples": set(),  # which samples a step has; for any script
    "saves": {"contract", "calls"},  # checkpoints that all workers write; for any script
    "train": {  # the runtime
        *("contract", "devices", "tracing", "pace", "declared"),
        *("samples", "datasets", "saves"),
    },
    "prepare": {"mirror"},  # data preparation, and its files in S3
    "sandbox": {
        "contract",
        "devices",
        "frozen",
        "errors",
        "config",
        "slurm",
    },  # a Slurm on this machine
    "examples": {"train"},  # what users copy; beside train they know what import trnslurm offers
}
# The floors of the training runtime: what lies at the top of train/, and its rooms above that.
TRAIN_GROUND = {
    "__init__",
    "background",
    "environment",
    "errors",
    "lightning",
    "models",
    "plan",
    "settings",
}
TRAIN_FLOORS = [
    "devices",
    "checkup",
    "checkpoint",
    "data",
    "optim",
    "sharded",
    "encoders",
    "loop",
    "classifier",
    "trainer",
    "export",
]
# The rooms of data preparation, in turn; what lies at the top of prepare/ is their ground.
PREPARE_FLOORS = [
    {"text"},
    {"arguments"},
    {"pipeline"},
    {"tokens", "bert", "labelled"},
    {"fetch"},
    {"__main__"},
]
# What launcher rooms may import of these: libraries of the nodes; runs, cli: the sandbox.
SHARED = {
    "mirror",
    "node.alone",
    "node.caps",
    "node.graphs",
    "node.hosts",
    "node.memory",
    "node.notify",
    "node.stacks",
    "node.triage",
    "node.usage",
    "prepare.options",
    "samples",
}


def allowed(part: str) -> set[str]:
    """What a part may import of ours."""
    if part in BESIDE:
        return BESIDE[part] | {part}
    below = set(FLOORS[: FLOORS.index(part) + 1]) | SHARED
    return below | {"sandbox"} if part in ("runs", "cli") else below


def test_every_part_has_its_floor() -> None:
    assert set(PARTS) == {*FLOORS, *BESIDE}


def test_the_reader_of_imports_sees_them_all(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("import a.b\nfrom c import d\ndef f():\n    import e\n    from g.h import i\n")
    assert set(imports(file)) == {"a.b", "c", "c.d", "e", "g.h", "g.h.i"}


@pytest.mark.parametrize("part", [p for p in PARTS if p != "__init__"])
def test_part_imports_only_what_it_may(part: str) -> None:
    for file in files(part):
        assert ours(file) <= allowed(part), file


def test_commands_and_calls_share_submission_not_each_other() -> None:
    for file in files("cli"):
        assert "api" not in ours(file), file


def test_the_package_itself_imports_nothing_of_ours() -> None:
    """It is on the nodes, without the launcher: what it offers is imported when it is used."""
    assert modules_behind(PACKAGE / "__init__.py") == set()
    program = """
import sys
before = {*sys.modules}
import trnslurm
print(*{*sys.modules} - before)
trnslurm.submit, trnslurm.Run, trnslurm.plan
print(*{*sys.modules} - before)
"""
    done = run_process([sys.executable, "-c", program], env={"PYTHONPATH": str(PACKAGE.parent)})
    first, all_of_them = (line.split() for line in done.ok.splitlines())
    foreign_to_python = {n for n in first if n.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign_to_python == {"trnslurm"}
    loaded = {name.partition(".")[0] for name in all_of_them}
    assert not loaded & (HEAVY | {"submitit", "cloudpickle", "jinja2", "click"})


def test_the_rooms_of_train_import_only_lower_ones() -> None:
    train = PACKAGE / "train"
    rooms: dict[str, set[str]] = {}
    for file in files("train"):
        room = file.relative_to(train).parts[0].removesuffix(".py")
        words = [name.split(".") for name in imports(file) if name.startswith("trnslurm.train.")]
        rooms[room] = rooms.get(room, set()) | {word[2] for word in words}
    assert rooms.keys() == {*TRAIN_GROUND, *TRAIN_FLOORS}
    for room, found in rooms.items():
        floor = TRAIN_FLOORS.index(room) + 1 if room in TRAIN_FLOORS else 0
        assert found <= {*TRAIN_GROUND, *TRAIN_FLOORS[:floor]}, room


def test_the_rooms_of_prepare_import_only_lower_ones() -> None:
    above = set().union(*PREPARE_FLOORS)
    for file in files("prepare"):
        room = file.relative_to(PACKAGE / "prepare").parts[0].removesuffix(".py")
        words = [name.split(".") for name in imports(file) if name.startswith("trnslurm.prepare.")]
        found = {word[2] for word in words} & above - {room}
        floor = next((n for n, rooms in enumerate(PREPARE_FLOORS) if room in rooms), 0)
        assert found <= set().union(*PREPARE_FLOORS[:floor]), file


@pytest.mark.parametrize("part", ["train", "prepare", "sandbox"])
def test_no_module_is_imported_in_a_circle(part: str) -> None:
    left = {
        module_name(file): {name for name in imports(file) if name.startswith(f"trnslurm.{part}")}
        for file in files(part)
        if file.name != "__init__.py"
    }
    left = {name: found & left.keys() for name, found in left.items()}
    while leaves := {name for name, found in left.items() if not found & left.keys()}:
        left = {name: found for name, found in left.items() if name not in leaves}
    assert not left


def test_no_modules_import_each_other_in_a_circle() -> None:
    needs = {module_name(file): modules_behind(file) for file in PACKAGE.rglob("*.py")}
    assert {"trnslurm.contract.rundir", "trnslurm.errors"} <= needs["trnslurm.records.run"]
    graphlib.TopologicalSorter(needs).prepare()  # an error that names a circle, if there is one


@pytest.mark.parametrize("part", [*FLOORS, "sandbox"])
def test_the_launcher_needs_no_torch(part: str) -> None:
    for file in files(part):
        assert not foreign(file) & HEAVY, file


@pytest.mark.parametrize("part", [p for p in PARTS if p != "schedulers"])
def test_only_schedulers_imports_submitit(part: str) -> None:
    for file in files(part):
        assert "submitit" not in foreign(file), file


def test_schedulers_does_import_it() -> None:
    assert any("submitit" in foreign(file) for file in files("schedulers"))


def test_only_slurm_starts_slurms_commands() -> None:
    """Elsewhere no command of Slurm's is the first word of an argument list."""
    word = re.compile(r"""\[\s*["'](sbatch|srun|squeue|scontrol|sacct|scancel)["']\s*,""")
    for part in [*FLOORS, "sandbox"]:
        for file in files(part):
            assert not word.search(file.read_text(encoding="utf-8")), file


def test_only_the_choice_asks_which_scheduler_a_run_has() -> None:
    """Others ask the scheduler; what is read before there is one compares the text of a profile."""
    asks = re.compile(r"""scheduler["'\])]* *(==|!=|\bin\b) *[("'{\w]""")
    asking = {
        str(file.relative_to(PACKAGE))
        for part in FLOORS
        for file in files(part)
        if asks.search(file.read_text(encoding="utf-8"))
    }
    profiles = {"config/load.py", "config/values.py", "remote/place.py"}
    assert asking == {"schedulers/choice.py", *profiles}


def test_what_every_node_runs_needs_the_standard_library_only() -> None:
    more = {"torchrun.py": {"torch"}, "packages.py": {"packaging"}}  # used where they are there
    for file in files("contract", "devices", "node"):
        assert foreign(file) <= sys.stdlib_module_names | more.get(file.name, set()), file


@pytest.mark.parametrize("file", sorted(JOBS.rglob("*.py")), ids=lambda f: str(f.relative_to(JOBS)))
def test_jobs_import_of_ours_only_train(file: Path) -> None:
    assert ours(file) <= {"train"}
    assert "submitit" not in foreign(file)


@pytest.mark.parametrize(
    "statement", ["import trnslurm.cli", "from trnslurm.cli import cli, plan, render"]
)
def test_the_command_line_starts_without_heavy_imports(statement: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement],
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert {"trnslurm", "click"} <= loaded
    assert not loaded & (HEAVY | {"submitit", "rich", "cloudpickle", "jinja2"})


def test_help_of_every_command_needs_no_submitit(run_cli, monkeypatch) -> None:
    done = run_cli("submit", "--help", environ={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.code == 0
    assert "import time:" in done.err and "| submitit" not in done.err
