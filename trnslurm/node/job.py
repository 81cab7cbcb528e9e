"""The state that attempts in the same job allocation share."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

from trnslurm.contract.files import read_json
from trnslurm.contract.options import AttemptOptions
from trnslurm.contract.rundir import INGREDIENTS, OF_COUNT, PLAN
from trnslurm.contract.variables import Variable
from trnslurm.node import relaunch
from trnslurm.node.beats import Beats
from trnslurm.node.components import component_ids, hosts_of_roles
from trnslurm.node.graphs import program as graphs
from trnslurm.node.state import RUN


class Job:
    """A job and its nodes."""

    def __init__(self, options: AttemptOptions) -> None:
        self.options = options
        self.senders: list[subprocess.Popen[bytes]] = []
        """Processes that send messages."""
        all_hosts = os.environ.get(Variable.ALLOCATION) or os.environ[Variable.HOSTS]
        self.allocation = all_hosts.split(",")
        """The training's nodes, in Slurm's order, without the lost and bad ones."""
        self.relay: threading.Thread | None = None
        """Passes on the srun output of a step on standby."""
        self.served = hosts_of_roles(os.environ)
        """The number of role nodes in each component. The first also has the training nodes."""
        hears = options.spares or options.fewer or options.standby or any(self.served)
        # The batch script runs on the first node.
        self.beats = Beats(os.environ["MASTER_ADDR"]) if hears else None
        self.scripts = {options.nodes: options.script}
        """The batch script for each node count that the training may use."""
        if options.fewer:
            most = read_json(RUN.path / PLAN).get("nodes")
            self.scripts = {most: "train.sbatch"} if isinstance(most, int) else {}
            for file in RUN.path.glob(f"{OF_COUNT.format('*')}/train.sbatch"):
                self.scripts[int(file.parent.name.rpartition("-")[2])] = str(file)

    def components(self, job_id: str) -> dict[str, list[str]]:
        """Map each component's job id to its nodes, without those that the training has lost.

        `job_id` is the id of the first component.
        """
        first, *others = self.served
        ids = [job_id, *component_ids(os.environ)[1:]]
        return dict(zip(ids, [[*self.allocation, *first], *others]))

    def counts(self) -> list[int]:
        """Return the node counts with which training may continue now."""
        own, graphs_needed = self.options.nodes, self.options.graphs
        return [
            count
            for count, script in self.scripts.items()
            if count == own
            or not graphs_needed
            or graphs.are_compiled(Path(script).with_name(INGREDIENTS))
        ]

    def begin_again(self, launch: relaunch.Launch) -> None:
        """Use the command and the environment of the next attempt."""
        self.options.nodes, self.options.command = launch.nodes, launch.command
        os.environ.clear()
        os.environ.update(launch.environ)
