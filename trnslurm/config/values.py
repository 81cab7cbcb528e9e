"""Checks of values that types cannot express: variable names, secrets, encodings, ranges."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trnslurm.config.schema import Cluster, Recipe, Servers
from trnslurm.config.script import OWN_LAUNCHER
from trnslurm.config.software import check_sdk
from trnslurm.config.times import LONGEST_MIN
from trnslurm.config.tree import flatten, lookup, marks_of
from trnslurm.contract.rundir import CHECKPOINTS
from trnslurm.declared import keeps
from trnslurm.errors import ConfigError, did_you_mean

_ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_SECRET = (
    r"(?i)(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE)?_?KEY)"
    r"(_|$)"
)
_PATH_OF_SECRET = r"(?i)\w+_(FILE|PATH|DIR)"
_SWITCH = r"(?i)[0-9]{1,7}|true|false|yes|no|on|off|"
# Tokens that are recognized by their first characters, in any text. Most of these prefixes are
# rules of https://github.com/gitleaks/gitleaks/blob/009e025ad410/config/gitleaks.tomlas well.
_SECRET_TEXT = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{30,}|wandb_v1_\w{30,}|nvapi-[\w-]{40,}"
    r"|sk-[\w-]{30,}|gsk_[A-Za-z0-9]{40,}|xai-\w{60,}|r8_[A-Za-z0-9]{30,}"
    r"|(AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}|AIza[\w-]{35}|GOCSPX-[\w-]{24,}|ya29\.[\w-]{30,}"
    r"|gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}"
    r"|gl(agent|cbt|dt|ffct|ft|imt|oas|pat|ptt|rt|soat)-[\w.-]{20,}"
    r"|xox[abeoprs]-[\w-]{20,}|xapp-\d-[\w-]{20,}"
    r"|npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{40,}|dckr_[op]at_[\w-]{20,}"
    r"|[rs]k_(live|prod|test)_[A-Za-z0-9]{16,}|SG\.[\w-]{20,}\.[\w-]{20,}"
    r"|do[opr]_v1_[0-9a-f]{64}|dapi[0-9a-f]{32}|hv[bs]\.[\w-]{24,}|gl(c|sa)_\w{32,}"
    r"|tskey-[a-z]+-[\w-]{20,}|AGE-SECRET-KEY-1[A-Z0-9]{58}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.)"  # a JSON Web Token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    # URLs that let anyone write to a channel, and URLs with a password.
    r"|\bhooks\.slack(-gov)?\.com/(services|workflows|triggers)/\w"
    r"|\bdiscord(app)?\.com/api/webhooks/\w|\.webhook\.office\.com/\w"
    r"|\bchat\.googleapis\.com/\S+[?&]key=|\w://[^\s/:@]+:[^\s/:@]+@"
)
_ASSIGNED = r"\b([A-Za-z_]\w*)=['\"]?([^\s'\";]+)"
# If these change, scripts break or workers do not find each other. `activate` can extend PATH.
_RESERVED = (
    r"PATH|PYTHONPATH|HOME|USER|HOSTNAME|ENV|(MASTER|SLURM|SBATCH|TRNSLURM|TORCHELASTIC)_\w+"
    r"|PL_(FIT__)?TRAINER__?NUM_NODES|LT_NUM_NODES|JSONARGPARSE_DEFAULT_ENV"
    r"|(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|NNODES|NPROC_PER_NODE|PET_\w+"
    r"|GLOO_SOCKET_IFNAME|NEURON_RT_ROOT_COMM_ID|XLA_COORDINATOR_PORT"
    # bash's own variables
    r"|_|IFS|PWD|OLDPWD|E?UID|PPID|SHELLOPTS|PS4|POSIXLY_CORRECT|SHLVL|RANDOM|SRANDOM|SECONDS"
    r"|EPOCH\w+|LINENO|HISTCMD|OPT(IND|ARG|ERR)|FUNCNAME|GROUPS|DIRSTACK|PIPESTATUS|REPLY|BASH\w*"
)
# Variables that a key sets. Otherwise either the variable or the key would be ignored.
_DECIDED = {
    "PJRT_DEVICE": "device", "NEURON_COMPILE_CACHE_URL": "compile_cache",
    "TORCH_NEURONX_NEFF_CACHE_DIR": "compile_cache",
    "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": "compile_cache",
    "NEURON_CC_FLAGS": "neuron.cc_flags", "NEURON_LOGICAL_NC_CONFIG": "instance_types.NAME.lnc",
}  # fmt: skip
_OF_LIBRARIES = re.compile(r"(HF|WANDB|MLFLOW|TRANSFORMERS|TORCH|NCCL|NEURON|TRITON)_\w+")
# Commas and colons are separators in the options of all three runtimes, and on the node a
# shell of enroot evaluates its mounts (pyxis 0.24).
_PLAIN = r"[^,:\s$`\"\\]"
MOUNTABLE = rf"~?/{_PLAIN}*"
MOUNTABLE_WORDS = (
    "absolute paths without blanks, commas, colons, quotes, dollar signs or backslashes"
)
_MOUNT = rf"~?/{_PLAIN}*(:/{_PLAIN}*(:r[ow])?)?"
_IMAGE = r"[^\s$`\"\\.-][^\s$`\"\\]*"
# The URL of a file with a harmless name, without a user or password.
_URL = r"https?://[^/\s@]+/([^\s]*/)?[^/\s.][^/\s]*"
# As in trnslurm.mirror.store, which also says where these characters come from.
_S3 = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9_!.*'()-]+)*/?"
_OF_A_SCRIPT: dict[str, Any] = {
    "arguments": [], "resume_arguments": [], "places": {}, "launcher_arguments": [], "links": [],
    CHECKPOINTS: "", "checkpoint_glob": "",
}  # fmt: skip
_OF_ANY_JOB = (OWN_LAUNCHER, "torchrun")


def check_values(tree: Mapping[str, Any]) -> None:
    """Reject a resolved tree with a value that must not reach a script."""
    check_cluster_values(tree)
    _check_environment("neuron.env", tree["neuron"]["env"])
    of_roles = [(f"roles.{r}.{key}", m) for r in tree["roles"] for key, m in marks_of(Servers)]
    for dotted, mark in (*marks_of(Cluster), *marks_of(Recipe), *of_roles):
        value = lookup(tree, dotted)
        if mark == "not empty" and value == "":
            raise ConfigError(f"{dotted} is empty: remove it, or set it to null")
        if mark != "not empty" and value is not None and not keeps(mark, value):
            raise ConfigError(f"{dotted} is {value}; it must be {mark}")
    for dotted in ("slurm.time_min", "slurm.default_time_min", "slurm.data_time_min"):
        if (value := lookup(tree, dotted) or 0) > LONGEST_MIN:
            raise ConfigError(
                f"{dotted} is {value}, which is more than a year: it must be at most {LONGEST_MIN}"
            )
    _check_script(tree)
    _check_data(tree)
    cache = tree["compile_cache"]
    if cache is not None and not re.match(r"/|\w+://", cache):  # Neuron uses it literally
        raise ConfigError(
            f"compile_cache is {cache!r}: it must be an absolute path or an s3:// URL"
        )
    if cache is None and tree["compile_layout"] == "per-host":
        raise ConfigError("compile_layout is per-host, but compile_cache is not set")
    if ".." in tree["data"]["path"].split("/"):
        raise ConfigError(
            "data.path contains '..': use a path under data_root, or an absolute path"
        )
    for section in ("model", "train", "strategy"):
        _check_job_values(section, tree[section])
    for key in (*tree["graphs"]["free"], *tree["graphs"]["on_off"]):
        if key not in tree["train"] and key not in tree["places"]:
            hint = did_you_mean(key, [*tree["train"], *tree["places"]])
            raise ConfigError(f"graphs: {key!r} is not a key of train{hint}")
    for reference in tree["reference"]:
        if reference["nodes"] < 1 or not 0 < reference["samples_per_s"] < math.inf:
            raise ConfigError(
                f"reference: {reference!r}: nodes and samples_per_s must be greater than zero"
            )


def _check_script(tree: Mapping[str, Any]) -> None:
    """Reject keys of a custom script in a recipe without one, and paths outside its project."""
    if not tree["project"]:
        for key, default in _OF_A_SCRIPT.items():
            if tree[key] != default:
                raise ConfigError(
                    f"{key} is set, but this recipe's job reads plan.json: only a custom "
                    "script, which has a project, can use it"
                )
        if tree["launcher"] not in _OF_ANY_JOB:
            raise ConfigError(
                f"launcher is {tree['launcher']}, but this recipe's job reads plan.json: use "
                f"{' or '.join(_OF_ANY_JOB)}; only a custom script, which has a project, can use "
                "others"
            )
    if tree["launcher_arguments"] and tree["launcher"] == OWN_LAUNCHER:
        raise ConfigError(
            f"launcher_arguments is set, but the launcher {OWN_LAUNCHER} has no options: set "
            "launcher to the program that the options are for, such as torchrun"
        )
    if tree["container"]["workdir"] and tree[CHECKPOINTS]:
        raise ConfigError(
            f"container.workdir is set, so {CHECKPOINTS} would be a directory in the image: pass "
            "{checkpoints} to the script instead"
        )
    alone = {key: [tree[key]] for key in (CHECKPOINTS, "checkpoint_glob")}
    for key, paths in {"links": tree["links"], **alone}.items():
        for path in paths:
            if path.startswith(("/", "~")) or ".." in path.split("/") or path == ".":
                raise ConfigError(f"{key}: {path!r} must be a path inside the project")


def check_cluster_values(tree: Mapping[str, Any]) -> None:
    """Reject a tree with cluster values that must not reach a shell."""
    for dotted, value in flatten(tree):
        for text in (dotted, *_texts(value)):
            # Bytes of the command line that are not UTF-8 arrive as surrogates.
            if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
                raise ConfigError(f"{dotted!r} is not valid UTF-8, or contains a NUL character")
            if _SECRET_TEXT.search(text):
                raise ConfigError(_secret(dotted))
    _check_environment("env", tree["env"])
    for line in tree["activate"]:
        for name, value in re.findall(_ASSIGNED, line):
            if is_secret(name, value) and not value.startswith(("$", "`")):
                raise ConfigError(_secret(f"activate: {name}"))
    for key in ("python", "slurm.bin_dir", "container.python"):
        value = lookup(tree, key)
        if value is not None and (value.startswith("-") or "\n" in value):
            raise ConfigError(f"{key} is {value!r}: it must be a path")
    if (kind := tree["slurm"]["gpu_type"]) and not re.fullmatch(r"[\w.+-]+", kind):
        raise ConfigError(
            f"slurm.gpu_type is {kind!r}: use the name that scontrol show node prints in Gres"
        )
    if (bin_dir := tree["slurm"]["bin_dir"]) and not bin_dir.startswith("/"):
        raise ConfigError(f"slurm.bin_dir is {bin_dir!r}: it must be an absolute path")
    # These must not depend on the working directory, and variables are not expanded.
    for key in ("run_root", "data_root"):
        if tree[key] and not tree[key].startswith(("/", "~")):
            raise ConfigError(
                f"{key} is {tree[key]!r}: it must be absolute, or start with ~. Variables are not "
                "expanded"
            )
    if "" in tree["slurm"]["partitions"]:
        raise ConfigError("slurm.partitions: a partition has no name")
    check_sdk(tree["neuron_sdk"])
    _check_container(tree)
    _check_notify(tree["notify"])
    if tree["mirror"] is not None and not re.fullmatch(_S3, tree["mirror"]):
        raise ConfigError(
            f"mirror is {tree['mirror']!r}: it must be s3://BUCKET/PREFIX, with only letters, "
            "digits and "
            "-_.!*'()"
        )
    if tree["stage_python"]:
        _check_staging(tree)
    for user in tree["compile_trust"]:
        if not re.fullmatch(r"[^\s-]\S*", user):
            raise ConfigError(f"compile_trust names {user!r}: it must be a user name")


def _check_container(tree: Mapping[str, Any]) -> None:
    """Reject a container that cannot be started, and paths that its options cannot express."""
    container = tree["container"]
    image, workdir = container["image"], container["workdir"]
    if workdir is not None and not workdir.startswith("/"):
        raise ConfigError(f"container.workdir is {workdir!r}: it must be an absolute path")
    for mount in container["mounts"]:
        if not re.fullmatch(_MOUNT, mount):
            raise ConfigError(
                f"container.mounts: {mount!r} must be HOST, HOST:INSIDE or HOST:INSIDE:ro, "
                f"with {MOUNTABLE_WORDS}; HOST can start with ~/"
            )
    for option in tree["slurm"]["sbatch"]:
        if option.startswith("--container-"):
            raise ConfigError(
                f"slurm.sbatch: {option}: the batch script itself would run in the image, without "
                "Slurm's commands: set container.image"
            )
    if image is None:
        return
    is_file = image.endswith((".sqsh", ".sif"))
    if not re.fullmatch(_IMAGE, image) or (is_file and not image.startswith(("/", "~/"))):
        raise ConfigError(
            f"container.image is {image!r}: it must be a name, a URI, or a file's absolute path"
        )
    if tree["scheduler"] == "local" and container["runtime"] == "pyxis":
        raise ConfigError(
            "container.runtime is pyxis, which is a plugin for Slurm's srun: "
            "on the local cluster, set podman or apptainer"
        )
    for key in ("run_root", "data_root", "compile_cache"):
        if tree[key] and "://" not in tree[key] and not re.fullmatch(MOUNTABLE, tree[key]):
            raise ConfigError(
                f"{key} is {tree[key]!r}: a container can mount only {MOUNTABLE_WORDS}"
            )


def parse_notify(words: Sequence[str]) -> dict[str, Any]:
    """Return the keys of `notify` set by the values of --notify; @FILE sets a webhook.

    They replace those of the profile and recipe. An empty value turns messages off.
    """
    if not words:
        return {}
    if "" in words:
        if len(words) > 1:
            raise ConfigError("--notify '' turns messages off: remove the other --notify options")
        return {"events": []}
    found: dict[str, Any] = {"command": None, "webhook": None, "plugin": None}
    for word in words:
        if re.match(r"@?https?://", word):  # not shown: it may be a secret
            raise ConfigError(
                "--notify: a URL would end up in the run's files: put it in a file with mode "
                "0600, and "
                "pass --notify @FILE"
            )
        key, value = "command", word
        for start, other in (("@", "webhook"), ("plugin:", "plugin")):
            if word.startswith(start):
                key, value = other, word.removeprefix(start)
        if found[key] is not None:
            raise ConfigError(
                f"--notify {word}: only one {key} is allowed, and one is already given"
            )
        found[key] = value
    return found


def _check_notify(notify: Mapping[str, Any]) -> None:
    """Reject an empty command, and a webhook whose URL would be in the run's files."""
    command, webhook, plugin = notify["command"], notify["webhook"], notify["plugin"]
    if command is not None and not command.strip():
        raise ConfigError("notify.command is empty: remove it, or set it to null")
    if plugin is not None and ("://" in plugin or not plugin.isprintable()):
        raise ConfigError(
            "notify.plugin: a URL would end up in the run's files: let the plug-in read it "
            "elsewhere"
        )
    if webhook is None:
        return
    if "://" in webhook:  # not shown: it may be a secret
        raise ConfigError(
            "notify.webhook is a URL, which would end up in the run's files: put it in a file "
            "with mode "
            "0600, and set notify.webhook to its path"
        )
    if not webhook.startswith(("/", "~/")) or "\n" in webhook:
        raise ConfigError(
            f"notify.webhook is {webhook!r}: it must be the absolute path of a file with the URL, "
            "or start with ~/"
        )


def _check_staging(tree: Mapping[str, Any]) -> None:
    """Reject stage_python if the environment is unknown or not used."""
    place, python = tree["stage_python"], tree["python"]
    if not place.startswith("/"):
        raise ConfigError(
            f"stage_python is {place!r}: it must be an absolute path on the nodes' own disks"
        )
    if tree["container"]["image"] is not None:
        raise ConfigError(
            "stage_python is set, but with container.image workers use the image's Python: "
            "set one of them to null"
        )
    if tree["scheduler"] == "slurm" and not python.startswith("/"):
        raise ConfigError(
            f"stage_python is set, but python is {python!r}: it must be the absolute path of the "
            "environment's bin/python"
        )


def _check_environment(prefix: str, env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not re.fullmatch(_ENV_NAME, name):
            raise ConfigError(f"{prefix}.{name}: not a valid environment variable name")
        if re.fullmatch(_RESERVED, name):
            raise ConfigError(f"{prefix}.{name}: the scripts set {name} themselves and rely on it")
        if key := _DECIDED.get(name):
            raise ConfigError(f"{prefix}.{name}: {key} determines {name}: set {key} instead")
        if is_secret(name, value):
            raise ConfigError(_secret(f"{prefix}.{name}"))


def _texts(value: Any) -> Iterator[str]:
    """Yield every string in a value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (*_texts(key), *_texts(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _check_data(tree: Mapping[str, Any]) -> None:
    data = tree["data"]
    for key in ("published", "checkpoint"):
        url = data[key]
        if url is not None and not re.fullmatch(_URL, url):
            raise ConfigError(f"data.{key} is {url!r}: it must be the URL of a file")
    for key in ("dataset", "tokenizer", "model", "text", "labelled.eval"):
        if ".." in (lookup(data, key) or "").split("/"):
            raise ConfigError(f"data.{key} contains '..', which leads out of its directory")
    for key, option in (("text", "--text"), ("labelled.eval", "--eval")):
        if (lookup(data, key) or "").startswith(("/", "~")):
            raise ConfigError(
                f"data.{key} must be in the recipe's directory; use {option} for any other file"
            )
    rows = data["labelled"]
    if len(rows["text"]) > 2:
        raise ConfigError(
            f"data.labelled.text names {len(rows['text'])} columns: use one for a text, or two "
            "for a pair"
        )
    for key in ("text", "labels"):
        if "" in rows[key] or len(set(rows[key])) < len(rows[key]):
            raise ConfigError(f"data.labelled.{key}: names must not be empty or repeated")
    if data["published"] and data["format"] != "bert":
        raise ConfigError("data.published works only with BERT shards: set data.format to bert")


def _check_job_values(dotted: str, value: Any) -> None:
    """Reject values that JSON, which the job reads, cannot represent."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_job_values(f"{dotted}.{key}", inner)
    elif isinstance(value, list):
        for inner in value:
            _check_job_values(dotted, inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{dotted} is {value}; it must be a finite number")
    elif not isinstance(value, str | int | float | None):
        raise ConfigError(f"{dotted} is a {type(value).__name__}: quote it")


def is_reserved(name: str) -> bool:
    """Check whether the scripts set a variable themselves."""
    return re.fullmatch(_RESERVED, name) is not None or name in _DECIDED


def for_libraries(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that training libraries read, except secrets and a job's own."""
    return [
        name
        for name, value in sorted(environ.items())
        if _OF_LIBRARIES.fullmatch(name) and not (is_secret(name, value) or is_reserved(name))
    ]


def is_secret(name: str, value: str) -> bool:
    path = re.fullmatch(_PATH_OF_SECRET, name) and value.startswith(("/", "~"))
    return bool(re.search(_SECRET, name)) and not (path or re.fullmatch(_SWITCH, value))


def _secret(dotted: str) -> str:
    return (
        f"{dotted} looks like a secret, which must not be in a run's files: "
        "put it in a file with mode 0600 and set a variable to its path"
    )
