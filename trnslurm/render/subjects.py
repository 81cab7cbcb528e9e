"""What the templates print: frozen objects, one for each subject of the scripts.

All is plain text, numbers and tuples: a template reaches nothing else.
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
    """The directory of a smaller node count of a range, with a slash."""


class BatchOnNodes(Frozen):
    """The batch on these nodes, by what formula, and what it is on other node counts."""

    facts: tuple[tuple[str, str], ...]
    formulas: tuple[tuple[str, int, str], ...]
    counts: str
    """A row of node counts, and below it the letter that differs among them, and its values."""
    row_of: str
    row: str
    row_unit: str


class NodeEnvironment(Frozen):
    """What is set for all programs of a node."""

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
    """Whether NCCL finds its plugin for EFA on the host, and not in an image."""
    emulated: bool
    """Whether all nodes are this machine."""

    @property
    def nccl_interfaces(self) -> str:
        """Return the interfaces over which NCCL's workers meet.

        After ^, names that begin with one of these words are left out (NCCL 2.30, matchIf in
        src/misc/utils.cc). A veth is a cable into a container or an agent of this host, such as
        SageMaker HyperPod's veth_def_agent, and no other node is behind it. AWS leaves out the
        same (awsome-distributed-training, micro-benchmarks/nccl-tests/slurm/nccl-tests-ami.sbatch).
        """
        return "lo" if self.emulated else "^lo,docker,veth"


class NeuronSettings(Frozen):
    """Trainium's compiler and runtime."""

    cc_flags: str
    lnc: int
    """Physical cores of a logical one; 0: the instance has no choice."""
    stochastic_rounding: bool
    compiles_once: bool
    """Whether a graph is given up after one failure."""
    graphs_ahead: int
    """How many graphs the host submits ahead; 0: the runtime takes no number."""


class CompiledGraphs(Frozen):
    """Where compiled graphs are."""

    ahead: bool = False
    """Whether a precompile compiles them."""
    unverified: bool = False
    root: str = ""
    """A shell word."""
    url: str | None = None
    layout: str = ""
    trust: str = ""
    per_host: bool = False


class AttemptCall(Frozen):
    """The program that keeps an attempt, trnslurm.node.attempt."""

    options: str
    """Shell words."""
    standby: bool = False
    """Whether the next attempt's workers are started ahead."""
    expedite: bool = False

    @property
    def log_prefix(self) -> str:
        """Return the beginning of the logs' names, for the shell."""
        return "${TRNSLURM_STANDBY:+standby-}" if self.standby else ""


class Hosts(Frozen):
    """Which of the job's nodes take part."""

    nodelist: str = _OF_A_STEP
    """srun's option, for the shell."""
    chooses: bool = False
    """Whether the job has more nodes than take part."""
    fewest: int = 0
    """Below this count no smaller one has a script; 0: there are none."""
    roles: tuple[tuple[str, str], ...] = ()
    """Which of the training's kind of nodes each role has, as `cut` counts them."""
    components: tuple[tuple[tuple[str, str], ...], ...] = ()
    """The same of the nodes in each partition that roles have for themselves."""
    trains: int = 0
    """How many of the job's nodes are for the training, spares included."""
    local_roles: str = ""
    """The emulated nodes of each role."""
    spares_fetch: bool = False
    """Whether spares fetch an environment or an image, before they are needed."""
    local: str = ""
    """The emulated nodes."""


class ExportPart(Frozen):
    """A checkpoint that becomes a Hugging Face folder; bash fills in the variables."""

    place: str
    """The directory with the code and the plan of its run."""
    step: str
    target: str


class ProjectPart(Frozen):
    """A custom script's directory."""

    links: tuple[tuple[str, str], ...]
    imports: tuple[str, ...]
    """Below the copy of the project: where Python finds its modules."""
    checkpoints: str
    """A shell word."""
    checkpoint_glob: str
    resuming: str
    """Shell words: arguments for an attempt that continues from a checkpoint."""
    beginning: str
    """Shell words: arguments for an attempt that has none."""
    keep_last: str
    """How many checkpoints stay; empty: all."""
    out: bool
    """Whether it writes results for other runs."""
    follows: bool
    """Whether it gets a checkpoint of another run."""
    exports_followed: bool
    """Whether it gets that checkpoint as a Hugging Face folder."""
    exports: tuple[ExportPart, ...]
    """The checkpoints that it gets so."""
    resumes: str
    """told or looks; empty: every attempt starts from the first step."""


class NodePart(Frozen):
    """What node.sh does before the workers start, and next to them."""

    open_files: int
    preflight: bool
    num_devices: int
    num_efa: int
    data: str
    usage_seconds: str
    hang_minutes: str
    profile: Profile
    no_kill: bool
