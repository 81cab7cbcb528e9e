"""The files of a run directory: all their names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from trnslurm.frozen import Frozen

RECORD = "run.json"
PLAN = "plan.json"
STRATEGY = "strategy.json"
CONFIG = "config.yaml"
INGREDIENTS = "graphs.json"
NODE_SCRIPT = "node.sh"
NOTIFY = "notify.json"
ROLES = "roles.json"
ROLE_SCRIPT = "roles/{}.sh"
"""What a node of a role runs."""
INPUTS = "inputs.json"
"""The runs from which this one uses something."""
CAPS = "caps.json"
MIRROR = "mirror.json"
CODE = "code"
PACKAGE = f"{CODE}/trnslurm.zip"
PLUGINS = f"{CODE}/plug-ins"
"""What a site's plug-ins added to the run, under a name that Python cannot import."""
NOTIFIERS = f"{PLUGINS}/notifiers"
NOTIFIER = "plug-in.json"
"""Next to the code of a notifier: its entry point and its package."""
CHECKPOINTS = "checkpoints"
OUT = "out"
OF_COUNT = "nodes-{}"
"""The directory of files for a node count, if a job can have fewer nodes."""
ARRAY = "array-{}"
"""A job array in the directory of its sweep: its script, and a link to the run of each task."""
HALVING = "halving.json"
"""The rungs of a sweep, in its directory."""
RUNG = "rung-{}"
"""The job array of a rung there, from the second rung on."""
RANKING = "ranking.json"
"""The ranking of the previous rung, in the directory of a rung."""
PREPARE = "prepare"
"""The only phase of a run that prepares data."""
# A format that older versions cannot read gets a higher number. A file without a number has 1.
RUN_FORMAT = 1
"""The format of run.json, for all files of the run directory except plan.json and the next two."""
DATA_FORMAT = 1
"""The format of the index of prepared data; trnslurm.prepare has the same number."""
_STATE_FILE = r"([a-z]+)-([0-9]+)\.json"
_NODE_LOG = r"[a-z]+-[0-9]+-node([0-9]+)\.log"
_OF_NODE = r"[a-z]+-[a-z]+-[0-9]+-node([0-9]+)\.json"
_USAGE = r"node([0-9]+)\.jsonl"
_FLIGHT = r"[a-z]+-[0-9]+-nccl-rank([0-9]{1,6})"
_MARK = r"step-([0-9]+)\.json"
_FAILED = r"failed-[a-z]+-[0-9]+-rank([0-9]+)\.json"


class RunFiles(Frozen, kw_only=False):
    """The paths of one run directory."""

    path: Path

    @property
    def is_run(self) -> bool:
        """Whether a job owns the directory: it was submitted, or its bundle was started by hand."""
        if self.record_file.is_file():
            return True
        return (self.path / PLAN).is_file() and bool(self.all_attempts())

    @property
    def record_file(self) -> Path:
        """The record of the submission: what was submitted, by whom, and from which code."""
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
        """The directory of the files for this node count, as set by a job with a range."""
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
    def roles_file(self) -> Path:
        """The servers alongside training; missing if there are none."""
        return self.path / ROLES

    @property
    def caps_file(self) -> Path:
        """How much the run may use over all attempts; missing without a cap."""
        return self.path / CAPS

    @property
    def mirror_file(self) -> Path:
        """The place in S3 to copy checkpoints to and fetch them from; missing without a mirror."""
        return self.path / MIRROR

    @property
    def patch_file(self) -> Path:
        """Uncommitted changes in the source tree at submission."""
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
    def causes(self) -> Path:
        """The failure causes that plug-ins define, one file per plug-in."""
        return self.path / PLUGINS / "causes"

    @property
    def notifiers(self) -> Path:
        """The code of the plug-in that sends messages, in a directory of the same name."""
        return self.path / NOTIFIERS

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
    def follow(self) -> Path:
        """The bundles that run for each checkpoint, one directory each."""
        return self.path / "follow"

    @property
    def followers(self) -> list[str]:
        """The names of these bundles, without one that is being written."""
        places = sorted(self.follow.iterdir()) if self.follow.is_dir() else []
        return [place.name for place in places if not place.name.startswith(".")]

    def rule_file(self, follower: str) -> Path:
        """Which checkpoints get a run, and how many of their jobs can run at the same time."""
        return self.follow / follower / "rule.json"

    def problem_file(self, follower: str) -> Path:
        """Why Slurm accepts no more of a follower's jobs."""
        return self.follow / follower / "problem.json"

    def best_checkpoints(self, follower: str) -> Path:
        """The checkpoint with the best score among a follower's runs, under its own name."""
        return self.follow / follower / "best"

    def mark_file(self, follower: str, step: int) -> Path:
        """The run and the job for a checkpoint, and its score."""
        return self.follow / follower / f"step-{step:08d}.json"

    def mark_files(self, follower: str) -> dict[int, Path]:
        """Return these files by step, first step first."""
        files = (self.follow / follower).glob("step-*.json")
        return dict(sorted((int(m[1]), f) for f in files if (m := re.fullmatch(_MARK, f.name))))

    @property
    def followed(self) -> Path:
        """The checkpoint of another run for which this run was started, and its step."""
        return self.path / "followed"

    @property
    def inputs_file(self) -> Path:
        """The runs from which this one uses something, and what it uses."""
        return self.path / INPUTS

    def input(self, name: str) -> Path:
        """What export.py needs to export another run: its code, and the checkpoint to export."""
        return self.path / "inputs" / name

    @property
    def taken_file(self) -> Path:
        """What the first attempt has found there. Later attempts use the same."""
        return self.state / "taken.json"

    @property
    def out(self) -> Path:
        """What a custom script has made for other runs."""
        return self.path / OUT

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def compiled(self) -> Path:
        """Compiled graphs of xla-cuda, cached for the run's next attempts."""
        return self.path / "compiled"

    @property
    def exports(self) -> Path:
        """The exported checkpoints, one folder each."""
        return self.path / "exported"

    def export(self, name: str) -> Path:
        """Return the folder to which a checkpoint is exported."""
        return self.exports / name

    @property
    def files_aside(self) -> Path:
        """The files for another node count, until they replace the run's own."""
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

    def server_logs(self, role: str, number: int) -> list[Path]:
        """Return the logs of a role's server, one for each start, first start first."""
        files = self.logs.glob(f"{role}-*-node{number}.log")
        found = {int(m[1]): file for file in files if (m := re.match(rf"{role}-(\d+)-", file.name))}
        return [file for _, file in sorted(found.items())]

    def last_server_log(self, role: str) -> int:
        """Return the number of the newest log of a role's servers, or 0 if there is none."""
        names = (re.match(rf"{role}-(\d+)-node", f.name) for f in self.logs.glob(f"{role}-*.log"))
        return max((int(found[1]) for found in names if found), default=0)

    def flight_file(self, phase: str, attempt: int, rank: int | str) -> Path:
        """The collectives that a worker had entered when one timed out, written by PyTorch."""
        return self.logs / f"{phase}-{attempt}-nccl-rank{rank}"

    def flight_files(self, phase: str, attempt: int) -> dict[int, Path]:
        """Return these files by rank."""
        files = self.logs.glob(self.flight_file(phase, attempt, "*").name)
        found = {int(m[1]): file for file in files if (m := re.fullmatch(_FLIGHT, file.name))}
        return dict(sorted(found.items()))

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def heartbeat_file(self) -> Path:
        """A file touched every 30 seconds while an attempt is running."""
        return self.state / "heartbeat"

    @property
    def stages_file(self) -> Path:
        """How attempts moved from stage to stage, and why, one line each."""
        return self.state / "stages.jsonl"

    @property
    def cancelled_file(self) -> Path:
        """A file that exists if a user cancelled the run. Slurm can forget a job that never ran."""
        return self.state / "cancelled.json"

    @property
    def enough_file(self) -> Path:
        """A file that exists if the run should end early, as newer checkpoints are no better."""
        return self.state / "enough.json"

    @property
    def rung_file(self) -> Path:
        """The rung of the run, in a sweep with --halving, and the step after which it ends."""
        return self.state / "rung.json"

    @property
    def servers_file(self) -> Path:
        """The state and address of each server of the run's roles."""
        return self.state / "servers.json"

    @property
    def server_changes_file(self) -> Path:
        """The state of each server over time, one line per change."""
        return self.state / "servers.jsonl"

    @property
    def excluded_file(self) -> Path:
        """The nodes that a requeued training job excludes: until when, and why."""
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

        The directory is listed, because NFS can answer from its cache about a single file that it
        has not seen before, but asks the server again when a directory is opened.
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
        """A request that the workers save and end, with the reason."""
        return self.state / f"stop-{phase}-{attempt}.json"

    def stopped_file(self, phase: str, attempt: int) -> Path:
        """A file that exists if all workers have saved and ended on request."""
        return self.state / f"stopped-{phase}-{attempt}.json"

    def stuck_file(self, phase: str, attempt: int) -> Path:
        """The workers that make no progress, according to the first worker that noticed."""
        return self.state / f"stuck-{phase}-{attempt}.json"

    def still_file(self, phase: str, attempt: int, node: int | str) -> Path:
        """How long a node's processes have done nothing, if that is long."""
        return self.state / f"still-{phase}-{attempt}-node{node}.json"

    def still_files(self, phase: str, attempt: int) -> dict[int, Path]:
        return _by_node(self.state.glob(self.still_file(phase, attempt, "*").name))

    def alone_file(self, phase: str, attempt: int) -> Path:
        """A file that exists if worker 0 trains without having joined the others, and afterward."""
        return self.state / f"alone-{phase}-{attempt}.json"

    def hang_file(self, phase: str, attempt: int) -> Path:
        """A request to all nodes for the stacks of their processes, because none makes progress."""
        return self.state / f"hang-{phase}-{attempt}.json"

    def stacks_file(self, phase: str, attempt: int, node: int | str) -> Path:
        """What the workers of a node were doing when they were asked."""
        return self.state / f"stacks-{phase}-{attempt}-node{node}.json"

    def stacks_files(self, phase: str, attempt: int) -> dict[int, Path]:
        return _by_node(self.state.glob(self.stacks_file(phase, attempt, "*").name))

    def usage_file(self, node: int | str, role: str = "") -> Path:
        """What a node, or the node of a role's server, used: one line per minute."""
        return self.path / "usage" / f"{f'{role}-' if role else 'node'}{node}.jsonl"

    def usage_files(self) -> dict[int, Path]:
        """Return the nodes' usage files by rank."""
        found = self.usage_file("*")
        files = found.parent.glob(found.name)
        known = {int(m[1]): file for file in files if (m := re.fullmatch(_USAGE, file.name))}
        return dict(sorted(known.items()))

    def machine_file(self, phase: str, attempt: int, node: int | str) -> Path:
        """What a node has: devices, drivers, limits."""
        return self.state / f"machine-{phase}-{attempt}-node{node}.json"

    def packages_file(self, phase: str, attempt: int) -> Path:
        """The versions of the packages with which an attempt failed."""
        return self.state / f"packages-{phase}-{attempt}.json"

    def notices_file(self, phase: str, attempt: int, node: int | str) -> Path:
        """Notices for the user about a node's devices, memory and network."""
        return self.state / f"notices-{phase}-{attempt}-node{node}.json"

    def notices_files(self, phase: str, attempt: int) -> dict[int, Path]:
        return _by_node(self.state.glob(self.notices_file(phase, attempt, "*").name))

    def pace_file(self, phase: str, attempt: int) -> Path:
        """How each worker's step time is spent, and which workers are slower than the others."""
        return self.state / f"pace-{phase}-{attempt}.json"

    @property
    def profile_request(self) -> Path:
        """A request that workers of a training job record their next steps."""
        return self.state / "profile.json"

    def profile_file(self, which: str, rank: int, kind: str) -> Path:
        """A worker's recording for a request: its trace, or the summary."""
        return self.path / "profile" / which / f"worker{rank}.{kind}"

    def profiles(self) -> list[tuple[str, int]]:
        """Return the requests that workers have answered, and which workers did."""
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
        """A file that exists if a message about an event was sent."""
        return self.state / f"told-{phase}-{attempt}-{event}.json"

    @property
    def sent_file(self) -> Path:
        """The last step of each project that was written for Weights & Biases offline."""
        return self.state / "sent-wandb.json"

    @property
    def sent_late_file(self) -> Path:
        """The metrics of the jobs for this run's checkpoints that each tracker has got."""
        return self.state / "sent-late.json"

    @property
    def order_file(self) -> Path:
        """The samples with which each attempt began, of how many, in which order; one line each."""
        return self.state / "order.jsonl"

    @property
    def saved_file(self) -> Path:
        """The newest checkpoint that a custom script reports as saved."""
        return self.state / "saved.json"

    @property
    def mirrored_file(self) -> Path:
        """The newest checkpoint that has a copy in S3, and why a newer one has none."""
        return self.state / "mirror.json"

    def failed_file(self, phase: str, attempt: int, rank: int | str) -> Path:
        """The cause of a worker's death."""
        return self.state / f"failed-{phase}-{attempt}-rank{rank}.json"

    def failed_files(self, phase: str, attempt: int) -> dict[int, Path]:
        """Return the causes of workers' deaths, by rank."""
        files = self.state.glob(f"failed-{phase}-{attempt}-rank*.json")
        found = {int(m[1]): file for file in files if (m := re.fullmatch(_FAILED, file.name))}
        return dict(sorted(found.items()))

    def preflight_file(self, phase: str, attempt: int, node: int | None = None) -> Path:
        """The preflight results of all nodes; with `node`, of a node that cannot reach node 0."""
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
        """What `doctor --run` measured on a node or worker, by its number."""
        return self.state / f"checkup-{what}{number}.json"


def _by_node(files: Iterable[Path]) -> dict[int, Path]:
    found = {int(m[1]): file for file in files if (m := re.fullmatch(_OF_NODE, file.name))}
    return dict(sorted(found.items()))
