"""Where a job's graphs lie, as its batch script says it in the environment."""

import os
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trnslurm.frozen import Frozen
from trnslurm.node.graphs.manifest import CacheError, key_dir, user_ids
from trnslurm.rundir import RunFiles, load_json


class GraphPlace(Frozen):
    """Where a job's graphs lie, as the batch script says it in the environment."""

    run: Path
    cache: Path
    key: str
    device: str
    per_host: bool
    on_nodes: bool
    """Graphs lie on the nodes themselves: another run's nodes may have none."""
    trusted: Collection[int]
    attempt: int
    node: int
    host: str

    @property
    def directory(self) -> Path:
        return key_dir(self.cache, self.key)

    @property
    def compile_command(self) -> str:
        """The command that compiles what is missing."""
        script = RunFiles(self.run).script("precompile").name
        start = "sbatch" if script.endswith(".sbatch") else "bash"
        return f"cd {shlex.quote(str(self.run))} && {start} {script}"

    def results(self) -> list[dict[str, Any]]:
        """Read what every node of this attempt wrote down."""
        nodes = load_json(RunFiles(self.run).plan_file)["nodes"]
        found = []
        for node in range(nodes):
            try:
                found.append(load_json(self.result_path(node)))
            except (OSError, ValueError) as error:
                raise CacheError(f"node {node} did not say what it compiled ({error})") from None
        return found

    def result_path(self, node: int) -> Path:
        """Return where a node of this attempt writes down what it compiled."""
        return RunFiles(self.run).graphs_file(self.attempt, node)

    def job_id(self) -> str:
        """Return the job of this attempt, as its state file says it."""
        return str(load_json(RunFiles(self.run).state_file("precompile", self.attempt))["job_id"])


def read_place() -> GraphPlace:
    """Read the environment."""
    environ = os.environ
    device, per_host = environ["TRNSLURM_DEVICE"], environ["TRNSLURM_CACHE_LAYOUT"] == "per-host"
    return GraphPlace(
        run=Path(environ["TRNSLURM_RUN_DIR"]),
        cache=Path(environ["TRNSLURM_CACHE"]).expanduser().absolute(),
        key=environ["TRNSLURM_GRAPH_KEY"],
        device=device,
        per_host=per_host,
        # Without a URL Neuron keeps them in /var/tmp.
        on_nodes=per_host or (device == "neuron" and "NEURON_COMPILE_CACHE_URL" not in environ),
        trusted=user_ids(environ["TRNSLURM_CACHE_TRUST"].split()),
        attempt=int(environ["TRNSLURM_ATTEMPT"]),
        node=int(environ.get("SLURM_NODEID", "0")),
        host=os.uname().nodename,
    )
