"""The values that templates print: frozen objects, one for each subject of the scripts.

All values are strings, numbers and tuples, so a template cannot reach anything else.
"""

from __future__ import annotations

from trnslurm.config.schema import Profile
from trnslurm.frozen import Frozen

_OF_A_STEP = (
    '${TRNSLURM_STEP:+--nodelist="$TRNSLURM_HOSTS"} '  # `submit --in`: the job may have more
)


class Header(Frozen):
    """What the first lines of the scripts say."""

    title: str
    node_title: str = ""
    by_hand: tuple[str, ...]
    place: str = ""
    """The directory of a smaller node count of a range, with a trailing slash."""


class BatchOnNodes(Frozen):
    """The batch on these nodes, its formulas, and the batch on other node counts."""

    facts: tuple[tuple[str, str], ...]
    formulas: tuple[tuple[str, int, str], ...]
    counts: str
    """A row of node counts. Below it come the letter that varies with them, and its values."""
    row_of: str
    row: str
    row_unit: str


class NodeEnvironment(Frozen):
    """What is set for all programs on a node."""

    umask: str
    path: str
    activate: tuple[str, ...]
    one_thread: bool = False
    """Whether many workers share a host."""
    variables: tuple[tuple[str, str], ...]
    """From `neuron.env` and `env`."""


class Network(Frozen):
    """How nodes reach each other."""

    efa: bool
    finds_plugin: bool
    """Whether NCCL finds its EFA plug-in on the host rather than in an image."""
    emulated: bool
    """Whether all nodes are emulated on this machine."""

    @property
    def nccl_interfaces(self) -> str:
        """Return the network interfaces that NCCL's workers use to find each other.

        After ^, NCCL skips interfaces whose names begin with one of these words (NCCL 2.30, matchIf
        in src/misc/utils.cc). A veth is a cable into a container or an agent on this host, such as
        SageMaker HyperPod's veth_def_agent, and does not lead to any other node. AWS skips the same
        interfaces (awsome-distributed-training,
        micro-benchmarks/nccl-tests/slurm/nccl-tests-ami.sbatch).
        """
        return "lo" if self.emulated else "^lo,docker,veth"


class NeuronSettings(Frozen):
    """Trainium's compiler and runtime."""

    cc_flags: str
    lnc: int
    """Physical cores per logical core, or 0 if the instance has no choice."""
    stochastic_rounding: bool
    compiles_once: bool
    """Whether compilation of a graph is given up after one failure."""
    graphs_ahead: int
    """How many graphs the host submits in advance, or 0 if the runtime does not accept a number."""


class CompiledGraphs(Frozen):
    """Where compiled graphs are."""

    ahead: bool = False
    """Whether a precompile job compiles them."""
    unverified: bool = False
    root: str = ""
    """A shell word."""
    url: str | None = None
    layout: str = ""
    trust: str = ""
    per_host: bool = False


class AttemptCall(Frozen):
    """The program that manages an attempt, trnslurm.node.attempt."""

    options: str
    """Shell words."""
    standby: bool = False
    """Whether standby workers are started for the next attempt."""
    expedite: bool = False

    @property
    def log_prefix(self) -> str:
        """Return the prefix of the logs' names, for the shell."""
        return "${TRNSLURM_STANDBY:+standby-}" if self.standby else ""


class Hosts(Frozen):
    """Which of the job's nodes take part."""

    nodelist: str = _OF_A_STEP
    """srun's option, for the shell."""
    chooses: bool = False
    """Whether the job has more nodes than take part."""
    fewest: int = 0
    """The smallest node count that has a script, or 0 if there are no smaller counts."""
    roles: tuple[tuple[str, str], ...] = ()
    """The nodes of each role among nodes of the training kind, counted as in `cut`."""
    components: tuple[tuple[tuple[str, str], ...], ...] = ()
    """The same for the nodes in each partition that roles have to themselves."""
    trains: int = 0
    """How many of the job's nodes are for training, including spares."""
    local_roles: str = ""
    """The emulated nodes of each role."""
    spares_fetch: bool = False
    """Whether spares fetch an environment or image before they are needed."""
    local: str = ""
    """The emulated nodes."""


class ExportPart(Frozen):
    """A checkpoint that becomes a Hugging Face folder. Bash fills in the variables."""

    place: str
    """The directory with the code and the plan of the checkpoint's run."""
    step: str
    target: str


class ProjectPart(Frozen):
    """A custom script's directory."""

    links: tuple[tuple[str, str], ...]
    imports: tuple[str, ...]
    """Paths within the copy of the project where Python finds its modules."""
    checkpoints: str
    """A shell word."""
    checkpoint_glob: str
    resuming: str
    """Shell words: arguments for an attempt that continues from a checkpoint."""
    beginning: str
    """Shell words: arguments for an attempt without a checkpoint."""
    keep_last: str
    """How many checkpoints to keep; empty for all."""
    out: bool
    """Whether the script writes results for other runs."""
    follows: bool
    """Whether the script gets a checkpoint of another run."""
    exports_followed: bool
    """Whether the script gets that checkpoint as a Hugging Face folder."""
    exports: tuple[ExportPart, ...]
    """The checkpoints that the script gets in that form."""
    resumes: str
    """told, added or looks; empty if every attempt starts from the first step."""
    lightning_cli: bool
    """Whether the project uses LightningCLI."""


class NodePart(Frozen):
    """What node.sh does before the workers start and while they run."""

    open_files: int
    preflight: bool
    num_devices: int
    num_efa: int
    data: str
    usage_seconds: str
    hang_minutes: str
    profile: Profile
    no_kill: bool
