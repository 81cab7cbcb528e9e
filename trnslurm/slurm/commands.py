"""Slurm's commands, which nothing else starts: argument lists, time limits, parsers.

What starts them is imported late: a plan, or a list of runs on this machine, calls none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trnslurm.errors import SlurmError
from trnslurm.frozen import Frozen
from trnslurm.slurm.reasons import job_reason

if TYPE_CHECKING:
    import subprocess

TIMEOUT_S = 30
_PING_S = 10
# These override a script's directives or a command's format. SLURM_CONF says where the cluster is.
_OVERRIDES = r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL)_\w+"
_KEPT = {"SLURM_CONF"}

_FIELD = r"(\w[\w/:]*)=(.*?)(?= +\w[\w/:]*=|\s*$)"


class QueueEntry(Frozen):
    """One job as the controller (squeue) or the accounting (sacct) shows it."""

    job_id: str
    state: str
    reason: str = ""
    start: str = ""
    nodes: str = ""
    directory: str = ""
    """Where it was submitted; empty: not shown."""

    @property
    def why(self) -> str:
        """The reason in plain words; Slurm's own where we have none."""
        return job_reason(self.reason)


def find_job(queue: Mapping[str, QueueEntry], job_id: str, directory: Path) -> QueueEntry | None:
    """Return a job if it is the one that was submitted from a run directory.

    A controller that is killed forgets the jobs of its last seconds and gives their numbers to
    others. Names are compared, as one directory may be mounted in two places.
    """
    entry = queue.get(job_id)
    if entry and entry.directory and Path(entry.directory).name != directory.name:
        return None
    return entry


def without_overrides(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment less the variables that would override a reviewed script."""
    left_out = {*overriding(environment)}
    return {k: v for k, v in environment.items() if k not in left_out}


def overriding(environment: Iterable[str]) -> list[str]:
    """Return the variables that Slurm's commands would take as options."""
    return sorted(k for k in environment if re.fullmatch(_OVERRIDES, k) and k not in _KEPT)


def own_words(command: str, stderr: str) -> str:
    """Return what a command said about its failure, as one line that names it once."""
    said = re.sub(rf"\b{command}: (error: )?", "", " ".join(stderr.split()))
    return f"{command}: {said}" if said else ""


class Slurm(Frozen, kw_only=False):
    """Slurm's commands in one directory, or on PATH."""

    bin_dir: str | None = None

    def find(self, command: str) -> str | None:
        """Return the command's path, or None; PATH is searched where `bin_dir` lacks it."""
        if self.bin_dir and (Path(self.bin_dir) / command).is_file():
            return str(Path(self.bin_dir) / command)
        # shutil.which would do, but takes longer to import than to look.
        found = (Path(place) / command for place in os.get_exec_path())
        return next((str(f) for f in found if os.access(f, os.X_OK) and f.is_file()), None)

    def path(self, command: str) -> str:
        """Return the command's path; if it is missing, say what to do."""
        if found := self.find(command):
            return found
        raise SlurmError(
            f"{command} not found: load your site's Slurm module, or set slurm.bin_dir in the "
            "cluster profile"
        )

    def call(self, command: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
        """Run a command and return what it printed; a failure is an error in its own words."""
        done = self._run(command, *arguments, timeout_s=timeout_s)
        if done.returncode:
            words = own_words(command, done.stderr)
            raise SlurmError(words or f"{command}: exit code {done.returncode}")
        return done.stdout

    def knows_option(self, option: str) -> bool:
        """Check whether this host's srun knows an option, such as one of a site's plugins."""
        return f"{option}=" in self._run("srun", "--help", timeout_s=TIMEOUT_S).stdout

    def _run(
        self, command: str, *arguments: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        import subprocess

        argv = [self.path(command), *arguments]
        try:
            return subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                env=without_overrides(os.environ),
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SlurmError(
                f"{command}: no answer from the controller in {timeout_s:g} s"
            ) from None
        except OSError as error:
            raise SlurmError(f"{argv[0]}: {error.strerror}") from None

    def configuration(self) -> dict[str, str]:
        """Return the keys of slurm.conf, as the controller has them."""
        text = self.call("scontrol", "show", "config")
        return dict(re.findall(r"(?m)^(\w+)\s*=\s*(.*?)\s*$", text))

    def show(self, what: str, *names: str) -> list[dict[str, str]]:
        """Return the fields of jobs, nodes or partitions, as `scontrol show` prints them."""
        lines = self.call("scontrol", "show", what, "-o", *names).splitlines()
        found = [dict(re.findall(_FIELD, line)) for line in lines if "=" in line]
        if names and not found:
            raise SlurmError(f"scontrol: shows no {what} {' '.join(names)}")
        return found

    def try_out(self, script: Path) -> tuple[bool, str]:
        """Return whether a script would be accepted now, and when it would start or why not."""
        done = self._run("sbatch", "--test-only", str(script), timeout_s=TIMEOUT_S)
        return done.returncode == 0, own_words("sbatch", done.stderr).removeprefix("sbatch: ")

    def queue(self, users: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> dict[str, QueueEntry]:
        """Return every job of these users that the controller remembers, by id."""
        text = self.call(
            "squeue",
            "--noheader",
            "--states=all",
            f"--users={','.join(users)}",
            "--format=%A|%T|%r|%S|%N|%Z",
            timeout_s=timeout_s,
        )
        found = {}
        for line in text.splitlines():
            parts = line.strip().split("|", 5)
            if len(parts) >= 5:
                job_id, state, reason, start, nodes, directory = [*parts, ""][:6]
                found[job_id] = QueueEntry(
                    job_id=job_id,
                    state=state,
                    reason=reason,
                    start=start,
                    nodes=nodes,
                    directory=directory,
                )
        return found

    def jobs_in(self, directory: str, user: str) -> list[str]:
        """Return the jobs that were submitted from a directory."""
        text = self.call(
            "squeue", "--noheader", "--states=all", f"--users={user}", "--format=%A|%j|%Z"
        )
        rows = [line.split("|", 2) for line in text.splitlines()]
        return [row[0] for row in rows if len(row) == 3 and row[2] == directory]

    def accounting(self, job_ids: Sequence[str]) -> dict[str, QueueEntry]:
        """Return what sacct knows about the jobs; nothing where there is no accounting."""
        if not job_ids or not self.find("sacct"):
            return {}
        try:
            text = self.call(
                "sacct",
                "--allocations",
                "--noheader",
                "--parsable2",
                "--duplicates",
                f"--jobs={','.join(job_ids)}",
                "--format=JobIDRaw,State,ExitCode,NodeList",
            )
        except SlurmError:
            return {}  # "Slurm accounting storage is disabled": ParallelCluster's default
        found = {}
        for line in text.splitlines():
            job_id, state, exit_code, nodes = (line.split("|") + [""] * 4)[:4]
            word = state.split()[0] if state else ""  # "CANCELLED by 1000"
            code, _, number = exit_code.partition(":")
            reason = f"exit code {code}" if code.strip("0") else ""
            if number.strip("0"):
                reason = f"killed by signal {number}"  # of the batch script itself
            found[job_id] = QueueEntry(job_id=job_id, state=word, reason=reason, nodes=nodes)
        return found

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; that one has ended already is no error."""
        try:
            self.call("scancel", *job_ids)
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise

    def ask_to_stop(self, job_id: str) -> None:
        """Send a job's batch script the signal to save and end."""
        self.call("scancel", "--batch", "--signal=USR1", job_id)

    def release(self, job_id: str) -> None:
        """Release a held job."""
        self.call("scontrol", "release", job_id)


def slurm_hint(root: Path = Path("/")) -> tuple[str | None, bool]:
    """Return what on this host hints at Slurm (None: nothing does), and whether srun is there."""
    if srun := Slurm().find("srun"):
        try:
            Slurm().call("scontrol", "ping", timeout_s=_PING_S)
        except SlurmError as error:
            # Installed for a sandbox, Slurm's commands belong to no cluster.
            if "Could not establish a configuration source" in str(error):
                return None, False
        return srun, True
    for pattern in ("opt/slurm", "etc/slurm*"):
        if found := next(root.glob(pattern), None):
            return str(found), False
    return None, False
