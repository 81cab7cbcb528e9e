"""The files of a run directory: all their names, and functions to read and write their JSON.

The launcher, the programs on the nodes and the training runtime share this module, so it needs only
the standard library. Readers trust no file: it may be missing, half written, huge or not a regular
file.
"""

from __future__ import annotations

import calendar
import contextlib
import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from trnslurm.frozen import Frozen

RECORD = "run.json"
PLAN = "plan.json"
STRATEGY = "strategy.json"
CONFIG = "config.yaml"
INGREDIENTS = "graphs.json"
NODE_SCRIPT = "node.sh"
NOTIFY = "notify.json"
CAPS = "caps.json"
MIRROR = "mirror.json"
CODE = "code"
PACKAGE = f"{CODE}/trnslurm.zip"
CHECKPOINTS = "checkpoints"
OF_COUNT = "nodes-{}"
"""The directory of the files for a node count, where a job may have fewer nodes."""
ARRAY = "array-{}"
"""A job array in the directory of its sweep: its script, and a link to the run of each task."""
PREPARE = "prepare"
"""The only phase of a run that prepares data."""
# A version whose files older ones cannot read gives them a higher number; one without it has 1.
RUN_FORMAT = 1
"""Of run.json, for all files of the run directory but plan.json and the next two."""
CHECKPOINT_FORMAT = 1
DATA_FORMAT = 1
"""Of the index of prepared data; trnslurm.prepare has the same number."""

_MAX_BYTES = 16 << 20
_USUAL_BYTES = 64 << 10  # a buffer of _MAX_BYTES takes ten times longer to allocate than to fill
_TAIL_BYTES = 64 << 10
_MOST_DIGITS = 300
_LINES_AT_ONCE = 256
_STATE_FILE = r"([a-z]+)-([0-9]+)\.json"
_NODE_LOG = r"[a-z]+-[0-9]+-node([0-9]+)\.log"
_OF_NODE = r"[a-z]+-[a-z]+-[0-9]+-node([0-9]+)\.json"
_USAGE = r"node([0-9]+)\.jsonl"
_FAILED = r"failed-[a-z]+-[0-9]+-rank([0-9]+)\.json"
_STEP = r"step-([0-9]{8,})"
_REMOVED = rf"{_STEP}(\.tmp-[0-9]+)?\.removed-[0-9]+"


class RunFiles(Frozen, kw_only=False):
    """The paths of one run directory."""

    path: Path

    @property
    def is_run(self) -> bool:
        """Whether a job has the directory: it was submitted, or its bundle was started by hand."""
        if self.record_file.is_file():
            return True
        return (self.path / PLAN).is_file() and bool(self.all_attempts())

    @property
    def record_file(self) -> Path:
        """The record of the submission: what, by whom, from which code."""
        return self.path / RECORD

    @property
    def plan_file(self) -> Path:
        """The numbers that the job reads and checks."""
        return self._of_count / PLAN

    @property
    def strategy_file(self) -> Path:
        """Settings of the recipe's sharding strategy, if it has one."""
        return self._of_count / STRATEGY

    @property
    def _of_count(self) -> Path:
        """The directory of the files for this node count, as a job with a range says."""
        return self.path / os.environ.get("TRNSLURM_FILES", "")

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / CONFIG

    @property
    def ingredients_file(self) -> Path:
        """What shapes the compiled graphs."""
        return self._of_count / INGREDIENTS

    @property
    def notify_file(self) -> Path:
        """Whom to notify about which events; missing without notifications."""
        return self.path / NOTIFY

    @property
    def caps_file(self) -> Path:
        """How much the run may use over all attempts; missing without a cap."""
        return self.path / CAPS

    @property
    def mirror_file(self) -> Path:
        """Where in S3 checkpoints are copied to, and fetched from; missing without either."""
        return self.path / MIRROR

    @property
    def patch_file(self) -> Path:
        """Uncommitted changes of the source tree at submission."""
        return self.path / "git.patch"

    @property
    def project_file(self) -> Path:
        """Which files of a custom script's project were not copied."""
        return self.code / "project.json"

    @property
    def code(self) -> Path:
        """The code that the nodes run."""
        return self.path / CODE

    @property
    def python_path(self) -> str:
        """PYTHONPATH for that code; older runs have this package as a directory."""
        return f"{self.path / PACKAGE}:{self.code}"

    def script(self, phase: str) -> Path:
        """Return the phase's batch script, whichever scheduler it was rendered for."""
        sbatch = self.path / f"{phase}.sbatch"
        return sbatch if sbatch.exists() else self.path / f"{phase}.sh"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def saves_in(self) -> Path:
        """Where the training saves: with the key `checkpoints`, a custom script does so in work/.

        The batch script says where. Without one, as without the key, it is checkpoints/.
        """
        import shlex  # rarely needed

        try:
            script = read_file(self.script("train")).decode(errors="surrogateescape")
        except OSError:
            return self.checkpoints
        _, _, rest = script.partition("\nexport TRNSLURM_CHECKPOINTS=")
        words = shlex.shlex(rest, posix=True)
        words.whitespace_split, words.commenters = True, ""
        try:
            place = words.get_token() if rest else ""
        except ValueError:  # no closing quotation
            place = ""
        return self.path / place.removeprefix("$PWD/") if place else self.checkpoints

    @property
    def compiled(self) -> Path:
        """Compiled graphs of xla-cuda, cached for the run's next attempts."""
        return self.path / "compiled"

    def export(self, name: str) -> Path:
        """Return where a checkpoint is exported to."""
        return self.path / "exported" / name

    @property
    def files_aside(self) -> Path:
        """The files of another node count, until they replace the run's own."""
        return self.path / ".next"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def batch_log(self, phase: str, job: str) -> Path:
        return self.logs / f"{phase}-{job}.log"

    def batch_logs(self, phase: str) -> list[Path]:
        """Return the logs of the batch script itself, oldest first."""
        logs = [f for f in self.logs.glob(f"{phase}-*.log") if not re.fullmatch(_NODE_LOG, f.name)]
        return sorted(logs, key=lambda f: f.stat().st_mtime)

    def node_log(self, phase: str, attempt: int, node: int | str) -> Path:
        return self.logs / f"{phase}-{attempt}-node{node}.log"

    def node_logs(self, phase: str, attempt: int) -> dict[int, Path]:
        """Return the logs of one attempt by node rank."""
        files = self.logs.glob(f"{phase}-{attempt}-node*.log")
        found = {int(m[1]): file for file in files if (m := re.fullmatch(_NODE_LOG, file.name))}
        return dict(sorted(found.items()))

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def heartbeat_file(self) -> Path:
        """Touched every 30 seconds while an attempt runs."""
        return self.state / "heartbeat"

    @property
    def cancelled_file(self) -> Path:
        """Exists once a user cancelled the run: Slurm may forget a job that never started."""
        return self.state / "cancelled.json"

    @property
    def excluded_file(self) -> Path:
        """The nodes that a requeued training excludes: until when, and why."""
        return self.state / "excluded.json"

    @property
    def turns(self) -> Path:
        """The locks of submissions, which take turns."""
        return self.state / "turns"

    @property
    def local_folder(self) -> Path:
        """The files of submitit's local controller."""
        return self.state / "local"

    def state_file(self, phase: str, attempt: int) -> Path:
        """The state of an attempt, or how it ended."""
        return self.state / f"{phase}-{attempt}.json"

    def all_attempts(self) -> list[tuple[str, int]]:
        """Return phase and number of every attempt that has begun.

        The directory is listed: NFS may answer from memory for a single file that it did not see
        before, but asks the server again when a directory is opened.
        """
        try:
            matches = [re.fullmatch(_STATE_FILE, file.name) for file in self.state.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [(match[1], int(match[2])) for match in matches if match]

    def attempt_numbers(self, phase: str) -> list[int]:
        """Return the attempts of a phase in order."""
        return sorted(number for name, number in self.all_attempts() if name == phase)

    def stop_file(self, phase: str, attempt: int) -> Path:
        """Requests that the workers save and end, with the reason."""
        return self.state / f"stop-{phase}-{attempt}.json"

    def stopped_file(self, phase: str, attempt: int) -> Path:
        """Exists once all workers have saved and ended on request."""
        return self.state / f"stopped-{phase}-{attempt}.json"

    def stuck_file(self, phase: str, attempt: int) -> Path:
        """The workers that make no progress, according to the first worker that noticed."""
        return self.state / f"stuck-{phase}-{attempt}.json"

    def still_file(self, phase: str, attempt: int, node: int | str) -> Path:
        """For how long a node's processes have done nothing, if that is long."""
        return self.state / f"still-{phase}-{attempt}-node{node}.json"

    def still_files(self, phase: str, attempt: int) -> dict[int, Path]:
        return _by_node(self.state.glob(self.still_file(phase, attempt, "*").name))

    def alone_file(self, phase: str, attempt: int) -> Path:
        """Exists once worker 0 of several has ended without ever joining the others."""
        return self.state / f"alone-{phase}-{attempt}.json"

    def hang_file(self, phase: str, attempt: int) -> Path:
        """Asks all nodes for the stacks of their processes, because none makes progress."""
        return self.state / f"hang-{phase}-{attempt}.json"

    def stacks_file(self, phase: str, attempt: int, node: int | str) -> Path:
        """What the workers of a node did when they were asked."""
        return self.state / f"stacks-{phase}-{attempt}-node{node}.json"

    def stacks_files(self, phase: str, attempt: int) -> dict[int, Path]:
        return _by_node(self.state.glob(self.stacks_file(phase, attempt, "*").name))

    def usage_file(self, node: int | str) -> Path:
        """What a node used, a line a minute."""
        return self.path / "usage" / f"node{node}.jsonl"

    def usage_files(self) -> dict[int, Path]:
        """Return what the nodes used, by their rank."""
        found = self.usage_file("*")
        files = found.parent.glob(found.name)
        known = {int(m[1]): file for file in files if (m := re.fullmatch(_USAGE, file.name))}
        return dict(sorted(known.items()))

    def machine_file(self, phase: str, attempt: int, node: int | str) -> Path:
        """What a node has: devices, drivers, limits."""
        return self.state / f"machine-{phase}-{attempt}-node{node}.json"

    def packages_file(self, phase: str, attempt: int) -> Path:
        """The versions of the packages in which an attempt failed."""
        return self.state / f"packages-{phase}-{attempt}.json"

    def notices_file(self, phase: str, attempt: int, node: int | str) -> Path:
        """What a person should know about a node's devices, memory and network."""
        return self.state / f"notices-{phase}-{attempt}-node{node}.json"

    def notices_files(self, phase: str, attempt: int) -> dict[int, Path]:
        return _by_node(self.state.glob(self.notices_file(phase, attempt, "*").name))

    def pace_file(self, phase: str, attempt: int) -> Path:
        """Where the time of each worker's steps goes, and who is slower than the others."""
        return self.state / f"pace-{phase}-{attempt}.json"

    @property
    def profile_request(self) -> Path:
        """Asks workers of a training to record their next steps."""
        return self.state / "profile.json"

    def profile_file(self, which: str, rank: int, kind: str) -> Path:
        """What a worker recorded for a request: its trace, or the summary."""
        return self.path / "profile" / which / f"worker{rank}.{kind}"

    def profiles(self) -> list[tuple[str, int]]:
        """Return which requests workers have answered, and which workers."""
        found = [
            (file.parent.name, int(number[1]))
            for file in self.path.glob("profile/*/worker*.summary.json")
            if (number := re.fullmatch(r"worker(\d+)\.summary\.json", file.name))
        ]
        return sorted(found)

    @property
    def guard_file(self) -> Path:
        """Why the guard of a local run has ended its script."""
        return self.state / "guard.json"

    def told_file(self, phase: str, attempt: int, event: str) -> Path:
        """Exists once a message about an event was sent."""
        return self.state / f"told-{phase}-{attempt}-{event}.json"

    @property
    def sent_file(self) -> Path:
        """The last step of each project that was written for Weights & Biases offline."""
        return self.state / "sent-wandb.json"

    @property
    def saved_file(self) -> Path:
        """The newest checkpoint that a custom script reports as saved."""
        return self.state / "saved.json"

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is none, or none is readable."""
        return max(newest_step(self.checkpoints), _step_in(read_json(self.saved_file)))

    def newest_checkpoint(self) -> Path | None:
        """Return the path of the newest checkpoint; None if there is none."""
        saved = read_json(self.saved_file)
        path, own = saved.get("path"), newest_step(self.checkpoints)
        if isinstance(path, str) and path and _step_in(saved) >= own and Path(path).exists():
            return Path(path)
        return self.checkpoints / checkpoint_name(own) if own else None

    @property
    def mirrored_file(self) -> Path:
        """The newest checkpoint of which S3 has a copy, and why it has none of a newer one."""
        return self.state / "mirror.json"

    def failed_file(self, phase: str, attempt: int, rank: int | str) -> Path:
        """What a worker died of."""
        return self.state / f"failed-{phase}-{attempt}-rank{rank}.json"

    def failed_files(self, phase: str, attempt: int) -> dict[int, Path]:
        """Return what workers died of, by rank."""
        files = self.state.glob(f"failed-{phase}-{attempt}-rank*.json")
        found = {int(m[1]): file for file in files if (m := re.fullmatch(_FAILED, file.name))}
        return dict(sorted(found.items()))

    def preflight_file(self, phase: str, attempt: int, node: int | None = None) -> Path:
        """The preflight's results of all nodes; with `node`, of a node that cannot reach node 0."""
        suffix = "" if node is None else f"-node{node}"
        return self.state / f"preflight-{phase}-{attempt}{suffix}.json"

    def preflight_node_files(self, phase: str, attempt: int) -> list[Path]:
        """Return the files of nodes that could not reach node 0."""
        return sorted(self.state.glob(f"preflight-{phase}-{attempt}-node*.json"))

    def preflight_files(self, phase: str, attempt: int) -> list[Path]:
        """Return node 0's file, which has the results of all nodes, or else the nodes' files."""
        file = self.preflight_file(phase, attempt)
        return [file] if file.exists() else self.preflight_node_files(phase, attempt)

    def graphs_file(self, attempt: int, node: int) -> Path:
        """What a node compiled in an attempt of the precompile phase."""
        return self.state / f"graphs-{attempt}-node{node}.json"

    def graphs_files(self, attempt: int) -> list[Path]:
        return sorted(self.state.glob(f"graphs-{attempt}-node*.json"))

    def checkup_file(self, what: str, number: int) -> Path:
        """What `doctor --run` measured on a node, or a worker (rank) among all others."""
        return self.state / f"checkup-{what}{number}.json"


def _by_node(files: Iterable[Path]) -> dict[int, Path]:
    found = {int(m[1]): file for file in files if (m := re.fullmatch(_OF_NODE, file.name))}
    return dict(sorted(found.items()))


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint; only a complete checkpoint has this name."""
    return f"step-{step:08d}"


def export_name(step: int) -> str:
    """Return the name of the folder to which a step's checkpoint is exported."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's name; None for any other name."""
    match = re.fullmatch(_STEP, name)
    return int(match[1]) if match else None


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, newest first; empty if there is no directory."""
    try:
        found = [path for path in directory.iterdir() if step_of(path.name) is not None]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: step_of(path.name) or 0, reverse=True)


def newest_step(directory: Path) -> int:
    """Return the step of the newest checkpoint by name; 0 if there is none, or none is readable."""
    try:
        return max((step_of(path.name) or 0 for path in checkpoints_in(directory)), default=0)
    except OSError:
        return 0


def _step_in(saved: dict[str, Any]) -> int:
    step = saved.get("step")
    return step if isinstance(step, int) and step > 0 else 0


def changed_at(directory: Path) -> float:
    """Return when the contents of a directory last changed, two levels deep; 0 if it is empty."""
    times = [0.0]
    for pattern in ("*", "*/*"):
        for path in directory.glob(pattern):
            with contextlib.suppress(OSError):
                times.append(path.lstat().st_mtime)
    return max(times)


def now_there(directory: Path) -> float:
    """Return the time by the clock that stamps a directory's files, as far as we may write there.

    It may be a file server's, and the clocks of hosts may be wrong.
    """
    import tempfile  # rarely needed, and slow to import

    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def temporary_name(step: int, attempt: int) -> str:
    """Return the name of a checkpoint that an attempt is writing, or died writing."""
    return f"{checkpoint_name(step)}.tmp-{attempt}"


def writer_of(name: str) -> int | None:
    """Return the attempt number in a checkpoint's temporary name; None for any other name."""
    match = re.fullmatch(rf"{_STEP}\.tmp-([0-9]+)", name)
    return int(match[2]) if match else None


def removed_name(name: str, attempt: int) -> str:
    """Return the name of a checkpoint that an attempt is deleting."""
    return f"{name}.removed-{attempt}"


def is_removed(name: str) -> bool:
    """Check whether a checkpoint with this name is being deleted."""
    return re.fullmatch(_REMOVED, name) is not None


def damaged_name(name: str, attempt: int) -> str:
    """Return the name under which an attempt keeps a damaged checkpoint for inspection."""
    return f"{name}.damaged-{attempt}"


def open_file(file: Path) -> BinaryIO:
    """Open a regular file for reading; do not block on a pipe."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return os.fdopen(descriptor, "rb")


def read_file(file: Path, most_bytes: int = _MAX_BYTES) -> bytes:
    """Return the contents of a regular file; raise an OSError if it has more than `most_bytes`."""
    with open_file(file) as stream:
        text = stream.read(_USUAL_BYTES)
        if len(text) == _USUAL_BYTES:
            text += stream.read(max(0, most_bytes + 1 - len(text)))
    if len(text) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes >> 20} MiB", str(file))
    return text


def load_json(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file; raise an OSError or a ValueError if there is none."""
    return _parse(read_file(file))


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty if there is none, or it is damaged."""
    try:
        return load_json(file)
    except (OSError, ValueError):
        return {}


def newer_format(told: Mapping[str, Any], known: int) -> str:
    """Return why a file of a newer trnslurm cannot be read; empty: it can be."""
    number = told.get("format")
    if isinstance(number, int) and number > known:
        return f"made by a newer trnslurm (format {number}, and this one reads {known}): update it"
    return ""


def umask_of(directory: Path) -> int:
    """Return the umask that gives new files the permissions of the directory that they are in.

    Only the owner may write: whoever writes run.json or the code decides what its owner runs.
    """
    return 0o022 | 0o077 & ~directory.stat().st_mode


def make_directory(directory: Path) -> None:
    """Make a directory with the permissions of its parent (`umask_of`), unless it exists."""
    mode = 0o777 & ~umask_of(directory.parent)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=mode)
        made = directory.stat().st_mode
        if made & 0o777 != mode:  # the shell's umask took more
            directory.chmod(mode | made & stat.S_ISGID)


def make_private(directory: Path) -> None:
    """Make a directory and its missing parents, for this user alone, unless it exists.

    So does https://specifications.freedesktop.org/basedir-spec for the user's directories. With
    `parents` mkdir makes the parents as the shell's umask says.
    """
    if not directory.is_dir():
        make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def write_file(file: Path, data: bytes) -> None:
    """Replace a file atomically; it gets the permissions of its directory (`umask_of`)."""
    with _written(file, data) as temporary:
        temporary.replace(file)


def write_json(file: Path, data: Any) -> None:
    """Replace a JSON file as `write_file` does."""
    write_file(file, _json(data))


def write_json_once(file: Path, data: Any) -> bool:
    """Write a JSON file atomically unless the file exists; return whether it was written."""
    with _written(file, _json(data)) as temporary:
        try:
            file.hardlink_to(temporary)
        except FileExistsError:
            return False
    return True


def _json_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the object of every complete line; skip lines that are cut off or being written."""
    for line in lines:
        try:
            yield _parse(line)
        except ValueError:
            continue


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of all complete lines of a file."""
    with open_file(file) as stream:
        lines = stream.readlines()
    found: list[dict[str, Any]] = []
    for start in range(0, len(lines), _LINES_AT_ONCE):
        some = lines[start : start + _LINES_AT_ONCE]
        try:  # parsed as one array, which takes a quarter of the time
            objects = json.loads(b"[%s]" % b",".join(some), parse_int=_int)
        except (ValueError, RecursionError, MemoryError):
            objects = []
        sound = len(objects) == len(some) and all(isinstance(each, dict) for each in objects)
        found += objects if sound else _json_lines(some)
    return found


def first_line(file: Path) -> dict[str, Any]:
    """Return the object of a file's first line; empty if there is none yet."""
    try:
        with open_file(file) as stream:
            return next(_json_lines([stream.readline(_MAX_BYTES)]), {})
    except OSError:
        return {}


def last_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file's last complete lines, the last first.

    Only the end of the file is read.
    """
    try:
        with open_file(file) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return
    yield from _json_lines(reversed(lines))


def last_line(file: Path) -> dict[str, Any]:
    """Return the object of a file's last complete line; empty if there is none."""
    return next(last_lines(file), {})


def _parse(text: bytes) -> dict[str, Any]:
    try:
        data = json.loads(text, parse_int=_int)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"nested too deeply, or too large ({error})") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _int(digits: str) -> int:
    """Return an integer; a ValueError for an integer that no float holds: it is no measurement."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has more than {_MOST_DIGITS} digits")
    return int(digits)


def _json(data: Any) -> bytes:
    return f"{json.dumps(data, indent=2)}\n".encode()


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Name the file in an error of the block: an error of a write, as on a full disk, has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


@contextlib.contextmanager
def _written(file: Path, data: bytes) -> Iterator[Path]:
    """Write the data to a hidden file next to `file`, which the block then renames."""
    temporary = file.with_name(f".{file.name}.{os.uname().nodename}.{os.getpid()}")
    mode = 0o666 & ~umask_of(file.parent)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with naming(file), os.fdopen(os.open(temporary, flags, mode), "wb") as stream:
            if stat.S_IMODE(os.fstat(stream.fileno()).st_mode) != mode:  # the umask took more
                with contextlib.suppress(OSError):  # a file system without modes
                    os.fchmod(stream.fileno(), mode)
            stream.write(data)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


_TIME = "%Y-%m-%dT%H:%M:%SZ"


def utc_time(seconds: float | None = None) -> str:
    """Return a time as records and messages have it; the default is now."""
    return time.strftime(_TIME, time.gmtime(seconds))


def seconds_of(text: str) -> float | None:
    """Return a record's time in seconds since the epoch; None if the text is no time."""
    try:
        return float(calendar.timegm(time.strptime(text, _TIME)))
    except (ValueError, OverflowError):
        return None


def is_private(directory: Path, *, readable: bool = False) -> bool:
    """Check whether a path is this user's own directory, which no other user can write to or read.

    With `readable` others may read the directory. A link counts as the link, not as its target.
    """
    try:
        status = directory.lstat()
    except OSError:
        return False
    closed = 0o022 if readable else 0o077
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return own and not status.st_mode & closed
