"""Fixtures that tests share: an empty home, a PATH without Slurm, a stand-in of Slurm."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import trnslurm
from trnslurm.render import cached

from . import durations, machine
from .processes import Done, run_process
from .stable_files import Stable
from .toy_site import graphs as graphs
from .toy_site import make_run as make_run
from .toy_site import site as site

FAKE_BIN = Path(__file__).parent / "fake_bin"
_SLURM = {"sbatch", "srun", "salloc", "squeue", "scontrol", "sacct", "scancel", "sinfo"}
_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "TRNSLURM_", "XDG_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="rewrite tests/goldens and tests/stable, to be reviewed",
    )
    parser.addoption("--record-durations", action="store_true", help="rewrite tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Make ready for imports, for what tests start, and for a record of durations."""
    gc.disable()  # until all is imported, which stays
    undo_ignored_signals()
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder())


def undo_ignored_signals() -> None:
    """Undo what nohup or a background job did to signals; processes that tests start inherit it.

    A signal that is inherited as ignored stays ignored in every process below, and bash cannot trap
    it. A handler, unlike SIG_IGN, becomes the default in a program that is started: so the tests
    themselves still outlive the terminal of `nohup make test`.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    durations.sort(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say what the machine was doing when a test failed."""
    report = yield
    if report.failed:
        report.sections.append(("the machine at that time", machine.state()))
    return report


def pytest_collection_finish() -> None:
    """Keep collections of garbage out of what was imported: all of PyTorch."""
    gc.freeze()
    gc.enable()


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a stand-in."""

    folder: Path
    command: str
    arguments: list[str]
    environ: dict[str, str]
    cwd: Path

    @property
    def script(self) -> bytes:
        """The bytes that sbatch was given."""
        return (self.folder / "script").read_bytes()


class FakeSlurm:
    """The stand-ins of Slurm's commands: what they were asked, and what to answer."""

    def __init__(self, state: Path) -> None:
        self._state = state
        (state / "calls").mkdir(parents=True)
        for name in ("order", "queue", "places"):
            (state / name).touch()

    def calls(self, command: str | None = None) -> list[Call]:
        """Every call in order, or those of one command."""
        names = (self._state / "order").read_text().split()
        calls = [self._call(self._state / "calls" / name) for name in names]
        return [c for c in calls if command in (None, c.command)]

    def forget_calls(self) -> None:
        """Clear the record of calls."""
        (self._state / "order").write_text("")

    def hangs(self) -> bool:
        """Return whether a command has begun to hang."""
        return any(self._state.glob("calls/*/hanging"))

    def queue(self, *lines: str) -> None:
        """Set the lines of squeue: id|state|reason|start|nodes, and |directory."""
        self.answer("queue", *lines)

    def answer(self, file: str, *lines: str) -> None:
        """Replace one of the files that the stand-ins print, whole, as they may be reading it."""
        temporary = self._state / f".{file}"
        temporary.write_text("".join(f"{line}\n" for line in lines))
        temporary.replace(self._state / file)

    def refuse(self, command: str, words: str) -> None:
        """Make a command (`sbatch`), or one call of it (`sbatch-2`), fail with these words."""
        self.answer(f"{command}.stderr", words)

    def answer_late(self, call: str) -> None:
        """Make one call of sbatch (`sbatch-2`) take the job without ever saying so."""
        self.answer(f"{call}.late")

    def relent(self, command: str) -> None:
        """Make a command that refused answer again."""
        (self._state / f"{command}.stderr").unlink()

    def hang(self, command: str) -> None:
        """Make a command, or one call of it, never answer."""
        self.answer(f"{command}.hang")

    @staticmethod
    def _call(folder: Path) -> Call:
        command, *arguments = (folder / "argv").read_text().split("\0")[:-1]
        pairs = (folder / "environ").read_text().split("\0")[:-1]
        return Call(
            folder=folder,
            command=command,
            arguments=arguments,
            environ=dict(pair.split("=", 1) for pair in pairs),
            cwd=Path((folder / "cwd").read_text().removesuffix("\n")),
        )


@pytest.fixture(scope="session", autouse=True)
def kept_renderings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what rendering computes for all tests of this process, and none of it elsewhere."""
    directory = tmp_path_factory.mktemp("rendering")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached, "own_directory", lambda: directory)
        yield


@pytest.fixture(scope="session")
def path_without_slurm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """This PATH without Slurm: a directory with its commands becomes links to the others."""
    remaining = []
    for number, word in enumerate(os.environ["PATH"].split(":")):
        directory = Path(word)
        if not any((directory / name).exists() for name in _SLURM):
            remaining.append(word)
            continue
        links = tmp_path_factory.mktemp(f"bin{number}")
        for file in directory.iterdir():
            if file.name not in _SLURM:
                (links / file.name).symlink_to(file)
        remaining.append(str(links))
    return ":".join(remaining)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path_without_slurm: str) -> Path:
    """An empty home and working directory, without this shell's settings of Slurm and trnslurm."""
    for name in list(os.environ):
        if name.startswith(_PREFIXES):
            monkeypatch.delenv(name)
    directory = tmp_path / "home"
    for name in ("home", "home/.config", "home/.local/state", "cwd"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("HOME", str(directory))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(directory / ".config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / ".local/state"))
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(tmp_path / "sandboxes"))
    monkeypatch.setenv("PATH", path_without_slurm)
    monkeypatch.chdir(tmp_path / "cwd")
    return directory


@pytest.fixture
def fake_slurm(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Stand-ins of Slurm's commands, first on PATH."""
    state = tmp_path / "slurm"
    monkeypatch.setenv("TRNSLURM_FAKE_SLURM", str(state))
    monkeypatch.setenv("PATH", f"{FAKE_BIN}:{os.environ['PATH']}")
    return FakeSlurm(state)


@pytest.fixture
def stable(request: pytest.FixtureRequest) -> Stable:
    """What users' scripts and files rely on, to compare."""
    return Stable(request.node.nodeid, update=request.config.getoption("--update-goldens"))


@pytest.fixture
def weird_path(tmp_path: Path) -> Path:
    """A directory whose name has blanks, quotes, a dollar sign and letters beyond ASCII."""
    directory = tmp_path / """it's a "wëird" $(näme) `x` 目录"""
    directory.mkdir()
    return directory


@pytest.fixture
def run_cli(home: Path) -> Callable[..., Done]:
    """Run `python -m trnslurm` as a process."""

    def run(
        *arguments: str | Path, timeout_s: float = 600, environ: dict[str, str] | None = None
    ) -> Done:
        path = {"PYTHONPATH": str(Path(trnslurm.__file__).parent.parent)}
        return run_process(
            [sys.executable, "-m", "trnslurm", *map(str, arguments)],
            env={**os.environ, **path, **(environ or {})}, timeout_s=timeout_s,
        )  # fmt: skip

    return run


@pytest.fixture
def cli(home: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Call the command line in this process: fast, and open to monkeypatch."""
    from trnslurm.cli import main

    def call(*arguments: str | Path) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return Done(code=end.value.code, out=out, err=err)

    return call
