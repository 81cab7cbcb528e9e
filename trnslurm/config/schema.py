"""The typed configuration: a cluster profile, a recipe, and the two of them resolved together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Device = Literal["neuron", "xla-cpu", "cpu", "cuda", "xla-cuda"]
"""What a worker computes on, as the catalog's DEVICES."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """What goes into the `#SBATCH` header and the srun line."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time_min: int | None = None
    """Time limit in minutes; None: the plan's estimate plus a quarter."""
    max_time_min: int | None = None
    """The partition's own limit; a longer request is refused before it is submitted."""
    max_nodes: int | None = None
    cpus_per_task: int | None = None
    """CPUs for the one task per node; None: all vCPUs of the instance type."""
    gpus_per_node: int | None = None
    """None: all GPUs of a GPU type. Neuron devices are no GRES: use `exclusive`."""
    exclusive: bool = True
    requeue: bool = True
    """Let Slurm start the job again after a node failure; a training's script requeues it too."""
    stop_before_s: int = 300
    """Seconds before its time limit at which a training saves, ends and is requeued: more than a
    save takes; at most a fifth of the limit. Slurm may signal up to a minute early. 0: never."""
    max_crashes: int = 3
    """Crashes in a row without a new checkpoint after which a training is given up."""
    exclude_hours: float = 24.0
    """Hours for which a requeued training leaves out a node that was found bad; 0: none."""
    srun_wait_s: int = 60
    """How long srun waits for the other nodes after the first one ended well."""
    sbatch: tuple[str, ...] = ()
    """Any other sbatch options, as in `--mail-type=FAIL`; each stands in the file."""
    bin_dir: str | None = None
    """Directory of sbatch, srun, squeue, scontrol, where they are not on PATH."""
    data_partition: str | None = None
    """Partition of `data prepare --submit`; None: nodes as for training."""
    data_cpus: int = 8
    """CPUs of such a job, and so its processes."""
    data_time_min: int = 240
    """Its time limit in minutes, and never more than max_time_min."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One cluster profile: the facts of a site."""

    scheduler: Literal["slurm", "local"] = "slurm"
    instance_type: str = "trn1.32xlarge"
    """A name of the catalog; `auto` on the local cluster: what this machine has."""
    device: Literal["auto", Device] = "auto"
    """auto: the instance type's, or another one of the same hardware that the recipe can use."""
    prefer_preset: str | None = None
    """Preset for recipes that have one of this name, where none is asked for."""
    workers_per_node: int | None = None
    """None: every core or GPU of the instance type."""
    run_root: str = "~/trnslurm-runs"
    """Where run directories are made; shared by all nodes."""
    data_root: str = "~/trnslurm-data"
    """Where prepared data lies, and recipes' `data.path` begins; shared by all nodes."""
    group_readable: bool = False
    """Run directories are 0700; true: 0750."""
    activate: tuple[str, ...] = ()
    """Shell lines that make the nodes' frozen Python environment usable."""
    python: str = "python3"
    """Its interpreter, absolute on a real cluster."""
    compile_cache: str | None = None
    """Compiled graphs: a directory on the shared file system, or an s3:// URL for Neuron's."""
    compile_layout: Literal["shared", "per-host"] = "shared"
    """One cache for all nodes, or a directory of it for each host's name."""
    compile_trust: tuple[str, ...] = ()
    """Users whose compiled graphs are run, besides one's own and root's."""
    preflight: bool = True
    """Whether all nodes are checked before a job's workers start."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every job of this cluster."""
    ask_above_node_hours: float | None = None
    """submit asks (or needs --yes) above this many node-hours."""
    slurm: Slurm = field(default_factory=Slurm)
    instance_types: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of, and additions to, the catalog of instance types."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`fixed` keeps `global_batch` over node counts; `per_worker` lets it grow with them."""

    mode: Literal["fixed", "per_worker"] = "fixed"
    global_batch: int | None = None
    """Samples per optimizer step (mode fixed)."""
    per_worker: int | None = None
    """Samples per worker and optimizer step (mode per_worker)."""
    micro_batch: int = 1
    """Samples per worker in one forward and backward pass."""
    allow_idle: bool = False
    """Accept more workers than there are micro-batches in a step."""
    padding: Literal["allow", "refuse"] = "allow"
    """refuse: only node counts on which every worker has as many micro-batches as all others."""


@dataclass(frozen=True, kw_only=True)
class BertShards:
    """What `data prepare` makes where `data.format` is bert, beside `seq_len` and `max_pred`."""

    masked_lm_prob: float = 0.15
    """The share of a sample's tokens that is masked."""
    whole_words: bool = False
    """Mask all tokens of a word, or none."""
    dupe_factor: int = 5
    """Passes over the text, each with other pairs and masks."""
    seed: int = 12345
    shards: int | None = None
    """Training shards; None: by the size of the text."""
    test_shards: int = 1
    """Shards of held-out documents, for evaluation."""
    wrapped: bool = False
    """Of `data.text`: its lines are wrapped, and their ends end no sentence."""


@dataclass(frozen=True, kw_only=True)
class LabelledRows:
    """What `data prepare` makes of rows where `data.format` is labelled, beside `seq_len`."""

    text: tuple[str, ...] = ()
    """The column of the text, or two of a pair; empty: the task's, else `text`."""
    label: str | None = None
    """The column of the label; None: `label`."""
    labels: tuple[str, ...] = ()
    """Their names in the order of their numbers; empty: the task's, else as the rows have them."""
    task: str | None = None
    """A task of GLUE, which decides columns, labels and metrics; None: `data.dataset_config` of
    GLUE's dataset, else none."""
    eval: str | None = None
    """Rows to evaluate on, in the recipe's directory; None: a share of `data.text`."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained on, and how `data fetch` and `data prepare` make it."""

    format: Literal["tokens", "bert", "labelled"] = "tokens"
    """What prepared data is: files of token ids, shards of samples for BERT's pretraining, or
    samples with labels."""
    path: str = ""
    """Prepared data, or a text file, below the profile's data_root; empty: what the job brings."""
    dataset: str | None = None
    """A dataset of the Hugging Face Hub, for `data fetch`."""
    dataset_config: str | None = None
    text: str | None = None
    """A text of the recipe's directory, prepared where there is no dataset."""
    tokenizer: str | None = None
    """A model of the Hub whose tokenizer is taken, a tokenizer.json, or train:V to train one."""
    model: str | None = None
    """A model of the Hub, whose weights `data fetch` brings for `train.init_from`."""
    holdout: float | None = None
    """Share of the documents for evaluation; None: 0.005 (of labelled rows 0.1), or the dataset's
    own split."""
    bert: BertShards = field(default_factory=BertShards)
    labelled: LabelledRows = field(default_factory=LabelledRows)
    published: str | None = None
    """URL of a tar of shards, which `data fetch` unpacks to `path`."""
    checkpoint: str | None = None
    """URL of a checkpoint, for `data fetch --checkpoint`."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a job shards its model over the workers; see trnslurm.plan.sharding."""

    name: Literal["", "fsdp", "deepspeed", "xla_fsdp"] = ""
    """Empty: the job has no strategies, or none is used."""
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    """The file of PyTorch's FSDP2, less what the plan decides."""
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    xla_fsdp: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A published or measured throughput, from which hours and costs are estimated."""

    instance_type: str
    nodes: int
    samples_per_s: float
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Neuron:
    """What applies on Neuron devices only."""

    cc_flags: str = ""
    """NEURON_CC_FLAGS, the compiler's options."""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """Which keys of `train` do not shape the compiled graphs; every other does."""

    free: tuple[str, ...] = ()
    """Their values change no graph."""
    on_off: tuple[str, ...] = ()
    """Only whether they are 0 (or empty) does, as that of how often is evaluated."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training job: what is trained, never where."""

    entry: str = "train.py"
    """The script that torchrun starts, in the recipe's directory."""
    default_cluster: str = "trn1"
    """The cluster that plan, show and render assume when none is chosen."""
    default_preset: str | None = None
    seq_len: int = 0
    """Tokens per sample; 0: unknown."""
    steps: int = 1
    """Optimizer steps of the whole run."""
    seed: int = 1234
    precision: Literal["fp32", "mixed", "bf16"] = "fp32"
    batch: Batch = field(default_factory=Batch)
    devices: tuple[Device, ...] = ()
    """What the job can run on; empty: every device."""
    strategy: Strategy = field(default_factory=Strategy)
    data: Data = field(default_factory=Data)
    begins_with: tuple[str, ...] = ()
    """Other recipes whose runs --from takes as well; their models must have the same sizes."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The job's own keys: the recipe declares each one with its default."""
    train: Mapping[str, Any] = field(default_factory=dict)
    graphs: Graphs = field(default_factory=Graphs)
    precompile: Literal["auto", "always", "never"] = "auto"
    """auto: where the device compiles graphs (neuron, xla-cpu)."""
    neuron: Neuron = field(default_factory=Neuron)
    reference: tuple[Reference, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where one resolved value came from, as `trnslurm show` prints it."""

    layer: str
    """command line, site lock, preset, recipe, cluster profile or default."""
    source: str
    """The file, or the option."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A recipe on a cluster, every value resolved."""

    recipe_name: str
    recipe_dir: str
    preset: str | None
    cluster_name: str
    cluster: Cluster
    recipe: Recipe
    tree: Mapping[str, Any]
    """The resolved values as one plain tree, as saved in config.yaml."""
    origins: Mapping[str, Origin]
    """Dotted key -> where its value came from."""

    @property
    def title(self) -> str:
        """The recipe and its preset, for people."""
        return self.recipe_name + (f" ({self.preset})" if self.preset else "")
