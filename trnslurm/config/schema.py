"""The typed configuration: a cluster profile, a recipe, and both resolved together."""

import os
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from trnslurm.config.script import OWN_LAUNCHER, Launcher
from trnslurm.config.search import RUN_ROOT
from trnslurm.devices import DEVICES
from trnslurm.frozen import Frozen

if TYPE_CHECKING:
    DeviceName: TypeAlias = str
    DeviceOrAuto: TypeAlias = str
else:
    DeviceName = Literal[(*DEVICES,)]
    DeviceOrAuto = Literal[("auto", *DEVICES)]


# Marks of a key, as in trnslurm/train/settings.py.
Value = TypeVar("Value")
NotNegative = Annotated[Value, "at least 0"]
Positive = Annotated[Value, "at least 1"]
MoreThanZero = Annotated[Value, "more than 0"]
NotEmpty = Annotated[Value, "not empty"]
Share = Annotated[Value, "at least 0", "less than 1"]


class Allowed(Frozen):
    """What a partition allows for one job; None means no limit."""

    fewest_nodes: Positive[int | None] = None
    max_nodes: Positive[int | None] = None
    job_cpus: Positive[int | None] = None
    job_gpus: Positive[int | None] = None
    max_time_min: Positive[int | None] = None


class Slurm(Frozen):
    """The settings of the `#SBATCH` header and of the srun command."""

    partition: NotEmpty[str | None] = None
    """The partition; None: Slurm's default partition."""
    account: NotEmpty[str | None] = None
    """The account that is charged; None: the user's default account."""
    qos: NotEmpty[str | None] = None
    """The quality of service; None: the default of the account."""
    constraint: NotEmpty[str | None] = None
    """Features that the nodes must have, as sbatch's `--constraint` accepts them."""
    reservation: NotEmpty[str | None] = None
    """The reservation in which jobs run."""
    time_min: Positive[int | None] = None
    """Time limit in minutes; None: the plan's estimate plus a quarter."""
    max_time_min: Positive[int | None] = None
    """The partition's own limit; longer requests are refused before submission."""
    default_time_min: Positive[int | None] = None
    """Time limit of a training run without time_min whose duration is unknown; None: pass
    --time."""
    fewest_nodes: Positive[int | None] = None
    """The fewest nodes of a job in the partition; smaller requests are refused, too."""
    max_nodes: Positive[int | None] = None
    """The most nodes of a job; larger requests are refused before submission."""
    job_cpus: Positive[int | None] = None
    """The maximum number of CPUs for a job across all its nodes. More nodes mean fewer CPUs on
    each."""
    job_gpus: Positive[int | None] = None
    """The maximum number of GPUs for a job across all its nodes."""
    partitions: Mapping[str, Allowed] = field(default_factory=dict)
    """Other partitions for the same jobs, by their names: Slurm starts a job in the first partition
    that allows the job and has free nodes."""
    cpus_per_task: NotNegative[int | None] = None
    """CPUs for the one task per node; None: all vCPUs of the instance type; 0: no option."""
    mem_per_node_mib: NotNegative[int | None] = None
    """Memory of a node in MiB; 0: all; None: Slurm's default, which `exclusive` does not raise."""
    gpus_per_node: NotNegative[int | None] = None
    """GPUs per node; None: all of a GPU type. Neuron devices are not a GRES: use `exclusive`."""
    gpu_type: NotEmpty[str | None] = None
    """The GPU type, as shown in a node's Gres; None: any."""
    exclusive: bool = True
    """Request entire nodes, which no other job shares."""
    requeue: bool = True
    """Let Slurm restart the job after a node failure; a training job also requeues itself."""
    expedite: bool = False
    """After a node failure, restart the job with priority on the nodes that Slurm keeps for it.
    Requires Slurm 25.11 or newer, and enable_expedited_requeue on the site."""
    stop_before_s: NotNegative[int] = 300
    """Seconds before the time limit at which a training run saves, ends and is requeued: more than
    a save takes, at most a fifth of the limit. Slurm can signal up to a minute early. 0: never."""
    max_crashes: Positive[int] = 3
    """Consecutive crashes without a new checkpoint after which a run gives up."""
    max_attempts: Positive[int | None] = None
    """Attempts of a run over all its jobs and resumes, after which the run ends; None: no limit."""
    max_node_hours: MoreThanZero[float | None] = None
    """Node-hours of a run, or of all runs of its sweep, over all attempts; None: no limit. Before
    it has used them up, a run saves and ends, as before a time limit."""
    max_cost: MoreThanZero[float | None] = None
    """The same limit in US dollars, by the instance type's price."""
    exclude_hours: NotNegative[float] = 24.0
    """Hours for which a requeued training job avoids a node that was found bad; 0: never."""
    leave_out_slow: bool = False
    """Whether to avoid a node that computes more slowly than the others, like a bad one, on
    restart."""
    min_nodes: Positive[int | None] = None
    """The fewest nodes that a training run accepts, at its start and after losing some; None:
    all."""
    grow_minutes: NotNegative[float] = 30.0
    """Minutes that a training run stays below its full number of nodes before it is requeued, if
    other nodes become free; 0: forever."""
    spares: NotNegative[int] = 0
    """Extra nodes that wait to take the place of a node that fails."""
    srun_wait_s: NotNegative[int] = 60
    """How long srun waits for the other nodes after the first one succeeds."""
    sbatch: tuple[str, ...] = ()
    """Other sbatch options, such as `--mail-type=FAIL`; the batch script contains each of them."""
    srun: tuple[str, ...] = ()
    """Other options of the srun that starts a job's workers, such as `--mpi=none`."""
    directives: tuple[str, ...] | None = None
    """The options in a user's batch script that set the size of its job; None if there is none."""
    array_task: NotNegative[int | None] = None
    """The index in its job array; each run of a sweep has its own."""
    bin_dir: NotEmpty[str | None] = None
    """Directory of sbatch, srun, squeue and scontrol, if they are not on PATH."""
    data_partition: NotEmpty[str | None] = None
    """Partition of `data prepare --submit`; None: the same nodes as training."""
    data_cpus: Positive[int] = 8
    """CPUs of a data job, which runs one process on each."""
    data_time_min: Positive[int] = 240
    """Time limit of a data job in minutes, never above max_time_min."""


class Container(Frozen):
    """The image in which a job runs on its nodes.

    The image needs bash, and a Python interpreter for the workers; the programs that supervise the
    job run on the host.
    """

    image: NotEmpty[str | None] = None
    """A name, a URI, or a file's absolute path, in the form `runtime` accepts. None: no
    container."""
    runtime: Literal["pyxis", "apptainer", "podman"] = "pyxis"
    """The program that starts the container: a plugin of srun, or a command on each node."""
    mounts: tuple[str, ...] = ()
    """Directories and files on the nodes, in addition to the run and its data: HOST, HOST:INSIDE or
    HOST:INSIDE:ro."""
    workdir: NotEmpty[str | None] = None
    """A custom script's working directory in the image; None: the run's copy of its project."""
    python: NotEmpty[str] = "python3"
    """The image's Python interpreter."""


Event = Literal["start", "failure", "requeue", "end", "stall", "notice"]


class Notify(Frozen):
    """Who gets messages about a run: no one, unless a command, webhook or plug-in is set."""

    command: str | None = None
    """A shell command that reads the message as JSON from its standard input."""
    webhook: str | None = None
    """A file with mode 0600 that contains the URL to which messages are posted."""
    plugin: str | None = None
    """A notifier from another package: NAME or NAME:TARGET."""
    events: tuple[Event, ...] = ("failure", "requeue", "end", "stall", "notice")
    """The events that trigger a message."""


class Cluster(Frozen):
    """One cluster profile: the facts about a site."""

    scheduler: Literal["slurm", "local"] = "slurm"
    """Where jobs run: slurm, or local, which is this machine without Slurm."""
    instance_type: str = "trn1.32xlarge"
    """A name in the catalog. On the local cluster `auto` detects the type of this machine."""
    device: DeviceOrAuto = "auto"
    """auto: the instance type's, or another device on the same hardware that the recipe
    supports."""
    prefer_preset: str | None = None
    """Default preset for recipes that have a preset of this name."""
    workers_per_node: Positive[int | None] = None
    """Workers on each node; None: one per core or GPU of the instance type."""
    run_root: NotEmpty[str] = RUN_ROOT
    """Parent of all run directories, on a file system that all nodes share."""
    data_root: NotEmpty[str] = "~/trnslurm-data"
    """Parent of prepared data (recipes' `data.path`), on a file system that all nodes share."""
    group_readable: bool = False
    """true: run directories are 0750 instead of 0700."""
    activate: tuple[str, ...] = ()
    """Shell lines that activate the nodes' Python environment."""
    python: NotEmpty[str] = "python3"
    """Interpreter of that environment; an absolute path on a real cluster."""
    stage_python: NotEmpty[str | None] = None
    """A directory on each node's own disk, to which the environment of `python` is copied before
    workers start; None: workers import from the environment itself."""
    neuron_sdk: str = "2.29.1"
    """The release of the AWS Neuron SDK in that environment; `env check` compares it."""
    compile_cache: NotEmpty[str | None] = None
    """Compiled graphs: a directory on the shared file system, or an s3:// URL for Neuron."""
    compile_layout: Literal["shared", "per-host"] = "shared"
    """One cache for all nodes, or a subdirectory per host name."""
    compile_trust: tuple[str, ...] = ()
    """Users whose compiled graphs are trusted, in addition to the job's user and root."""
    preflight: bool = True
    """Check all nodes before a job's workers start."""
    usage_seconds: NotNegative[float] = 10.0
    """How often, in seconds, each node samples its devices, processors, memory and network; 0:
    never."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every job on this cluster."""
    container: Container = field(default_factory=Container)
    """The image of every job on this cluster, or how to start a recipe's image."""
    notify: Notify = field(default_factory=Notify)
    """Who gets messages about every run on this cluster."""
    causes: tuple[str, ...] = ()
    """More causes of failures: absolute paths of TOML files, or names of plug-ins."""
    mirror: NotEmpty[str | None] = None
    """Where in S3 each checkpoint is copied: s3://BUCKET/PREFIX; None: nowhere."""
    mirror_mib_per_s: MoreThanZero[float] = 200.0
    """The upload limit in MiB per second."""
    mirror_wait_min: NotNegative[float] = 10.0
    """Minutes that a run waits at its end for copies while nothing more arrives in S3."""
    ask_above_node_hours: NotNegative[float | None] = None
    """Above this many node-hours, submit asks for confirmation or --yes."""
    slurm: Slurm = field(default_factory=Slurm)
    instance_types: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the catalog of instance types, and new types."""

    @property
    def umask(self) -> int:
        """The umask for everything that writes into runs and prepared data."""
        return 0o027 if self.group_readable else 0o077


class Batch(Frozen):
    """`fixed`: the same `global_batch` on any node count; `per_worker`: it grows with workers."""

    mode: Literal["fixed", "per_worker"] = "fixed"
    """A global batch that is the same on any number of nodes, or a batch for each worker."""
    global_batch: Positive[int | None] = None
    """Samples per optimizer step (mode fixed)."""
    per_worker: Positive[int | None] = None
    """Samples per worker and optimizer step (mode per_worker)."""
    micro_batch: Positive[int] = 1
    """Samples per worker in one forward and backward pass."""
    allow_idle: bool = False
    """Accept more workers than a step has micro-batches."""
    padding: Literal["allow", "refuse"] = "allow"
    """refuse: accept only node counts that divide the micro-batches evenly among the workers."""


class BertShards(Frozen):
    """How `data prepare` makes shards for BERT, in addition to `seq_len` and `max_pred`."""

    masked_lm_prob: Annotated[float, "more than 0", "less than 1"] = 0.15
    """Fraction of a sample's tokens to mask."""
    whole_words: bool = False
    """Mask either all tokens of a word or none."""
    dupe_factor: Positive[int] = 5
    """Passes over the text, each with different pairs and masks."""
    seed: NotNegative[int] = 12345
    """The random seed for pairs and masks."""
    shards: Positive[int | None] = None
    """Number of training shards; None: the size of the text decides."""
    test_shards: NotNegative[int] = 1
    """Number of shards of held-out documents, for evaluation."""
    wrapped: bool = False
    """Whether the lines of `data.text` are wrapped, so that a line's end does not end a
    sentence."""


class LabelledRows(Frozen):
    """How `data prepare` makes samples from labeled rows, in addition to `seq_len`."""

    text: tuple[str, ...] = ()
    """The text column, or two columns for pairs; empty: the task's, or `text` without a task."""
    label: NotEmpty[str | None] = None
    """The label column. If None, the task's column, or `label` if there is no task."""
    labels: tuple[str, ...] = ()
    """Label names in numeric order; empty: the task's, or without a task those in the rows."""
    task: NotEmpty[str | None] = None
    """A GLUE task, which sets columns, labels and metrics, or ner, with a list of words and one of
    their labels in each row; None: `data.dataset_config` if the dataset is GLUE."""
    eval: NotEmpty[str | None] = None
    """A file of evaluation rows in the recipe's directory; None: a fraction of `data.text`."""


class Data(Frozen):
    """The training data, and how `data fetch` and `data prepare` make it."""

    format: Literal["tokens", "bert", "labelled"] = "tokens"
    """Files of token ids, shards of samples for BERT pretraining, or labeled samples."""
    path: str = ""
    """Prepared data or a text file, under the profile's data_root; empty: the job has its own
    data."""
    dataset: NotEmpty[str | None] = None
    """A dataset on the Hugging Face Hub for `data fetch`."""
    dataset_config: NotEmpty[str | None] = None
    """The dataset's configuration on the Hub."""
    text: NotEmpty[str | None] = None
    """A text file in the recipe's directory, which is prepared if there is no dataset."""
    tokenizer: NotEmpty[str | None] = None
    """A model on the Hub whose tokenizer to use, a tokenizer.json, or train:V to train one."""
    model: NotEmpty[str | None] = None
    """A model on the Hub whose weights `data fetch` downloads for `train.init_from`."""
    samples: Positive[int | None] = None
    """Samples in one pass over the training data. `plan` uses them to compute where `train.epochs`
    ends; None: unknown."""
    holdout: Share[float | None] = None
    """Fraction of documents held out for evaluation; None: the dataset's own split, or 0.005
    without one (0.1 for labeled rows)."""
    bert: BertShards = field(default_factory=BertShards)
    labelled: LabelledRows = field(default_factory=LabelledRows)
    published: str | None = None
    """URL of a tar file of shards, which `data fetch` unpacks to `path`."""
    checkpoint: str | None = None
    """URL of a checkpoint, for `data fetch --checkpoint`."""


class Strategy(Frozen):
    """How a job shards its model across its workers; see trnslurm.plan.sharding."""

    name: Literal["", "fsdp", "deepspeed", "xla_fsdp", "tensor"] = ""
    """How the model is sharded; empty: not at all."""
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    """Settings of PyTorch's FSDP2 that the plan does not decide."""
    fsdp_file: str = ""
    """The Trainer's fsdp_config as a JSON file, merged into `fsdp`; relative to the recipe's
    directory."""
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """Settings for DeepSpeed."""
    deepspeed_file: str = ""
    """A DeepSpeed configuration as a JSON file, merged into `deepspeed`; relative to the recipe's
    directory."""
    xla_fsdp: Mapping[str, Any] = field(default_factory=dict)
    """Settings for torch_xla's FSDP."""
    xla_fsdp_file: str = ""
    """The Trainer's fsdp_config with xla as a JSON file, merged into `xla_fsdp`; relative to the
    recipe's directory."""
    tensor: Mapping[str, Any] = field(default_factory=dict)
    """Tensor parallelism: `workers` is the number of workers of a node that divide each layer."""


class Reference(Frozen):
    """A published or measured throughput, the basis for estimated hours and costs."""

    instance_type: str
    nodes: int
    samples_per_s: float
    source: str = ""
    of: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the measurement, by dotted key; a list names alternatives. The throughput
    does not apply to jobs with other settings."""


class Neuron(Frozen):
    """Settings for Neuron devices only."""

    cc_flags: str = ""
    """NEURON_CC_FLAGS: the compiler's options, for both Trainium devices."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for device neuron, that is, for PyTorch/XLA."""


class Graphs(Frozen):
    """Keys of `train`, or placeholders of a script, that do not affect compiled graphs."""

    free: tuple[str, ...] = ()
    """Keys whose values do not affect any graph."""
    on_off: tuple[str, ...] = ()
    """Keys for which only zero (or empty) versus nonzero matters, such as an evaluation
    interval."""


class Profile(Frozen):
    """Steps that worker 0 records, as with `trnslurm profile`."""

    at: NotNegative[int] = 0
    """The step of an attempt after which recording starts; 0: never."""
    steps: Annotated[int, "at least 1", "at most 100"] = 3
    """How many steps are recorded."""


class Servers(Frozen):
    """A role: servers alongside the training job, one on each of the role's nodes."""

    command: tuple[str, ...] = ()
    """The command of each server, as a list of words. {host} and {port} are its own address, and
    {role.url}, {role.urls}, {role.address} or {role.addresses} are those of another role."""
    nodes: Positive[int] = 1
    """Nodes of the role, in addition to those for training."""
    partition: NotEmpty[str | None] = None
    """The partition of the role's nodes; None: the nodes are like those for training."""
    sbatch: tuple[str, ...] = ()
    """Other sbatch options for nodes in a separate partition, such as `--gres=gpu:2`."""
    spares: NotNegative[int] = 0
    """Nodes that wait to replace a lost node."""
    ready: str = ""
    """What shows that a server is ready: a URL that answers, such as http://{host}:{port}/health,
    tcp, or a file; empty: it listens on {port}, if its command has that placeholder."""
    ready_min: MoreThanZero[float] = 10.0
    """Minutes that a server has to become ready, or can later go without answering, before it is
    killed and restarted."""
    restart: Literal["alone", "all"] = "alone"
    """alone: a server that ends is restarted while training continues. all: the training is
    restarted as well, from its last checkpoint."""


class Recipe(Frozen):
    """One training job: the settings for training, without those of a cluster."""

    entry: str = "train.py"
    """The script to start, in the recipe's directory or in `project`. A custom job can also use `-m
    MODULE`, or `-- PROGRAM` on the nodes."""
    project: str = ""
    """The directory of a custom script, relative to the recipe's directory; the run gets a copy of
    it. Empty: the script is written for trnslurm and reads plan.json."""
    arguments: tuple[str, ...] = ()
    """The arguments of a custom script, in which placeholders such as {micro_batch} are filled
    in."""
    resume_arguments: tuple[str, ...] = ()
    """The arguments that `trnslurm resume RUN -- ARGUMENTS` adds."""
    places: Mapping[str, str] = field(default_factory=dict)
    """More placeholders: the value of `places.lr` replaces {lr} in the arguments."""
    launcher: Launcher = OWN_LAUNCHER
    """The program that starts the script. trnslurm's own, torchrun, accelerate, deepspeed and srun
    start it once per worker; python, and script for a program that is not Python, once per node;
    job only once, on the first node."""
    launcher_arguments: tuple[str, ...] = ()
    """Options for the launcher itself, such as --config_file for accelerate; trnslurm's own has
    none."""
    links: tuple[str, ...] = ()
    """Files and directories of the project, such as data, that the run links to instead of
    copying."""
    checkpoints: str = ""
    """The script's checkpoint directory, relative to its working directory; empty: {checkpoints},
    if the arguments have that placeholder."""
    checkpoint_glob: str = ""
    """A pattern for the script's checkpoints, relative to its working directory or to
    {checkpoints}, such as out/ckpt-*.pt; empty: the formats that common libraries write."""
    roles: Mapping[str, Servers] = field(default_factory=dict)
    """Servers alongside a custom script's training job, by the names of their roles."""
    follows: str = ""
    """The run whose checkpoints the script gets, one for each of its own runs, as {checkpoint},
    {step} and {export}."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """The directories of other runs, by the names in {NAME.out}, {NAME.checkpoint} and so on."""
    starts_if: str = ""
    """A condition on a metric that an input reports, such as evaluate.accuracy >= 0.6. If it does
    not hold when the run starts, the run fails."""
    keep_last: NotNegative[int] = 0
    """How many of the script's newest checkpoints a run keeps, if nothing else deletes them; 0:
    all."""
    hang_minutes: NotNegative[float] = 30.0
    """Minutes without output and without CPU use after which a training run is ended as hung; 0:
    never."""
    standby: bool = True
    """Whether to start the workers of the next attempt in advance, to wait on a node with enough
    memory."""
    profile: Profile = field(default_factory=Profile)
    """Steps that are recorded without a request."""
    default_cluster: str = "trn1"
    """The cluster that plan, show and render use if none is selected."""
    default_preset: str | None = None
    """The preset that is used if none is selected."""
    seq_len: NotNegative[int] = 0
    """Tokens per sample; 0: unknown."""
    steps: Positive[int] = 1
    """Optimizer steps in the whole run."""
    seed: NotNegative[int] = 1234
    """The random seed."""
    precision: Literal["fp32", "mixed", "bf16"] = "fp32"
    """mixed: autocast to bf16; bf16: bf16 parameters and gradients, too."""
    batch: Batch = field(default_factory=Batch)
    devices: tuple[DeviceName, ...] = ()
    """Devices that the job supports; empty: all."""
    strategy: Strategy = field(default_factory=Strategy)
    data: Data = field(default_factory=Data)
    begins_with: tuple[str, ...] = ()
    """Other recipes whose runs --from accepts; their models must have the same sizes."""
    zero1: bool | None = None
    """For `plan`, if the job has no `train.zero1`: whether workers on Trainium shard the optimizer
    state. None: unknown, so the job's memory is unknown."""
    optimizer_bytes: Mapping[str, float] = field(default_factory=dict)
    """For `plan`: the bytes of state per fp32 parameter that a job's own optimizer keeps, by the
    optimizer's name in train.optimizer."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The job's own keys; the recipe declares each key with its default."""
    train: Mapping[str, Any] = field(default_factory=dict)
    graphs: Graphs = field(default_factory=Graphs)
    container: Container = field(default_factory=Container)
    """The job's image, or part of its settings; the profile has the rest."""
    precompile: Literal["auto", "always", "never"] = "auto"
    """auto: on devices that compile graphs (neuron, torchneuron, xla-cpu)."""
    neuron: Neuron = field(default_factory=Neuron)
    reference: tuple[Reference, ...] = ()
    """Published or measured speeds, from which `plan` estimates hours."""


class Origin(Frozen):
    """Where a resolved value came from, as `trnslurm show` prints it."""

    layer: str
    """command line, site lock, preset, recipe, cluster profile or default; run or bundle for a
    configuration that was read from there."""
    source: str
    """The file or option."""
    repeats: bool = False
    """Whether an option, or a strategy file, only repeats the key's previous value."""


class Config(Frozen):
    """A recipe on a cluster, with every value resolved."""

    recipe_name: str
    recipe_dir: str
    """The directory of recipe.yaml; for a custom script without a recipe, the script."""
    preset: str | None
    cluster_name: str
    cluster: Cluster
    recipe: Recipe
    tree: Mapping[str, Any]
    """The resolved values as one plain tree, as saved in config.yaml."""
    origins: Mapping[str, Origin]
    """Dotted key -> where its value came from."""

    @property
    def code_dir(self) -> Path:
        """Return the directory that a run copies: the recipe's, or its project's."""
        return Path(os.path.normpath(Path(self.recipe_dir, self.recipe.project)))

    @property
    def code_name(self) -> str:
        """Return the location of that copy within a run's code."""
        return "project" if self.recipe.project else f"jobs/{self.recipe_name}"

    @property
    def title(self) -> str:
        """Return the recipe and its preset, for messages."""
        return self.recipe_name + (f" ({self.preset})" if self.preset else "")
