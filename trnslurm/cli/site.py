"""cluster detect, env check, completion: set up trnslurm on a site."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from trnslurm.cli import cli
from trnslurm.cli.options import cluster_option, json_option, workspace_option
from trnslurm.cli.output import Terminal, echo_json, echo_table, say
from trnslurm.cluster.execute import check_environment
from trnslurm.config.catalog import catalog, find
from trnslurm.config.load import resolve_cluster
from trnslurm.config.schema import Cluster
from trnslurm.config.search import SETTINGS_FILE, Workspace, packaged_root, user_root
from trnslurm.config.software import device_of
from trnslurm.contract.files import make_private, write_file
from trnslurm.errors import ConfigError, SlurmError, TrnslurmError
from trnslurm.render.search_path import search_path
from trnslurm.runs.tables import cells_of, count
from trnslurm.slurm.ask import ask_one_of_each
from trnslurm.slurm.commands import Slurm
from trnslurm.slurm.detect import DetectedCluster, Nodes, detect
from trnslurm.slurm.parallelcluster import is_cluster_file, read_cluster_file
from trnslurm.slurm.profile import ASK, find_shared, missing_efa, profile_text, who_knows
from trnslurm.slurm.snapshot import Snapshot

# PCS has Slurm there, on PATH of login shells only (awslabs/awsome-distributed-ai,
# architectures/aws-pcs/assets/scripts/install-enroot-pyxis.sh).
_OF_PCS = Path("/opt/aws/pcs/scheduler")
# Errors of scontrol where neither slurm.conf nor a DNS record names the controller.
_NO_CONFIGURATION = re.compile("configuration source|configuration file|s_p_parse_file|DNS SRV")


@click.group("cluster")
def cluster_command() -> None:
    """Make a cluster profile.

    \b
    Example:
      trnslurm cluster detect --write
    """


@cluster_command.command("detect")
@click.option(
    "--partition", metavar="NAME", help="Partition to use  [default: the one with accelerators]."
)
@click.option("--write", is_flag=True, help="Write a profile to your own cluster-config/.")
@click.option("--name", metavar="NAME", help="Name of the profile  [default: Slurm's ClusterName].")
@click.option("--bin-dir", metavar="DIR", help="Directory of Slurm's commands.")
@click.option(
    "--dump", metavar="FILE", help="Write Slurm's answers to a file, for --from or a sandbox."
)
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="Read a file from --dump, or a ParallelCluster configuration (.yaml).",
)
@click.option(
    "--ask-nodes",
    is_flag=True,
    help="Run a one-minute job on one node of each kind to find out what it is.",
)
@click.option(
    "--timeout", default=600.0, help="Number of seconds to wait for the nodes of --ask-nodes."
)
@json_option
def detect_command(
    partition: str | None,
    write: bool,
    name: str | None,
    bin_dir: str | None,
    dump: str | None,
    source: str | None,
    ask_nodes: bool,
    timeout: float,
    console: Terminal,
) -> None:
    """Inspect this host's Slurm: partitions, nodes, instance types, limits and accounting.

    A dump contains nodes, partitions, your accounts and the names of every QOS. It contains no
    information about other users, addresses or paths. --ask-nodes finds what Slurm does not report:
    EC2 instance types, EFA, GPUs and Neuron devices.

    \b
    Example:
      trnslurm cluster detect
      trnslurm cluster detect --write --partition compute
      trnslurm cluster detect --write --ask-nodes
      trnslurm cluster detect --dump lab.json
      trnslurm cluster detect --from lab.json --write
      trnslurm cluster detect --from trn1-16-nodes.yaml --write --name trn1-east
    """
    if ask_nodes and (dump or source):
        other = "--dump" if dump else "--from"
        raise ConfigError(f"--ask-nodes starts a job on this cluster: omit {other}")
    if source and is_cluster_file(Path(source)):
        bin_dir = bin_dir or "/opt/slurm/bin"  # ParallelCluster's place
    slurm = _find_slurm(bin_dir)
    shared = None
    if source is None:
        seen, shared = _look(slurm), find_shared()
    elif is_cluster_file(Path(source)):
        seen, shared, left_out = read_cluster_file(Path(source), catalog())
        for kind in left_out:
            click.echo(
                f"warning: {source}: {kind} is not in the catalog and was left out", err=True
            )
    else:
        seen = Snapshot.load(Path(source))
    if dump:
        _dump(seen, Path(dump))
        return
    site = detect(seen, catalog())
    if ask_nodes:
        site = _ask(slurm, site, partition, timeout)
    chosen = _choose(site, partition)
    if console.as_json:
        echo_json({**asdict(site), "chosen": chosen.label})
    elif not write:
        _print_site(site, chosen)
    if chosen.doubt and not write:
        click.echo(_doubt(chosen), err=True)
    if write:
        write_profile(**_profile(slurm, site, chosen, name, shared, here=source is None))


def profile_here(
    partition: str | None, name: str | None, bin_dir: str | None, ask_for_s: float | None
) -> dict[str, str]:
    """Return the profile of this host's Slurm cluster: its name, text and warning."""
    slurm = _find_slurm(bin_dir)
    site = detect(_look(slurm), catalog())
    if ask_for_s is not None:
        site = _ask(slurm, site, partition, ask_for_s)
    return _profile(slurm, site, _choose(site, partition), name, find_shared())


def _look(slurm: Slurm) -> Snapshot:
    try:
        return Snapshot.take(slurm)
    except SlurmError as error:
        if not _NO_CONFIGURATION.search(str(error)):
            raise
        raise SlurmError(
            "Slurm is installed here, but no cluster is configured: run this on the cluster's "
            "head or login node, or set SLURM_CONF to its slurm.conf"
        ) from None


def _ask(
    slurm: Slurm, site: DetectedCluster, partition: str | None, timeout_s: float
) -> DetectedCluster:
    _choose(site, partition)  # refuse a wrong name first
    return ask_one_of_each(slurm, site, partition, catalog(), timeout_s=timeout_s, say=say)


def _dump(seen: Snapshot, file: Path) -> None:
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(seen.to_json())
    except FileExistsError:
        raise ConfigError(
            f"--dump {file}: the file already exists: remove it, or choose another"
        ) from None
    except OSError as error:
        file.unlink(missing_ok=True)  # the half that a full disk took
        raise ConfigError(f"--dump {file}: {error.strerror}") from None
    click.echo(
        f"Wrote {file}: {count(len(seen.nodes), 'node')} in "
        f"{count(len(seen.partitions), 'partition')}"
    )
    path = file if "/" in str(file) else f"./{file}"
    click.echo(f"To try a cluster like this on one machine: trnslurm sandbox up --like {path}")


def _profile(
    slurm: Slurm,
    site: DetectedCluster,
    chosen: Nodes,
    name: str | None,
    shared: Path | None,
    *,
    here: bool = True,
) -> dict[str, str]:
    # A ClusterName such as lab-2.5 is no profile's name.
    own = re.sub(r"[^\w-]", "-", site.cluster)
    _refuse_shadowing(name or own, given=name is not None)
    known = catalog().get(chosen.instance_type or "")
    warning = ""
    if shared is None and known and known.device.on_trainium:
        where = "in each node's /var/tmp and are lost with the node"
        if not known.device.cache_on_nodes:
            where = "below run_root"
        warning = (
            "warning: no shared file system was found on this host, so compile_cache is null and "
            f"compiled graphs stay {where}. Set compile_cache, run_root and data_root to "
            "directories that all nodes share"
        )
    if why := missing_efa(known, chosen):
        warning = (
            f"warning: {why}: the profile records this, and jobs use the available network "
            "between nodes"
        )
    if chosen.doubt:
        warning = _doubt(chosen)
    if chosen.unusable:
        warning = f"warning: partition {chosen.name} does not accept your jobs: {chosen.unusable}"
    return {
        "name": _profile_name(name or own),
        "text": profile_text(site, chosen, known, slurm.bin_dir, shared, here=here),
        "warning": warning,
    }


def _doubt(chosen: Nodes) -> str:
    taken = "its jobs use no GPUs" if chosen.gpus else "its jobs use the CPUs"
    fix = "add it to instance_types" if chosen.told else f"{who_knows(chosen)}: {ASK}"
    return (
        f"warning: {chosen.label}: {chosen.doubt} Until you fix the profile, {taken}. To fix it: "
        f"{fix}"
    )


def _find_slurm(bin_dir: str | None) -> Slurm:
    """Return Slurm's commands, including their directory if a job would not find them otherwise."""
    slurm = Slurm(bin_dir)
    if bin_dir is not None:
        return slurm
    if (found := slurm.find("scontrol")) is None:
        of_pcs = sorted(_OF_PCS.glob("slurm-*/bin"))
        return Slurm(str(of_pcs[-1]) if of_pcs else "/opt/slurm/bin")  # ParallelCluster's place
    place = str(Path(found).parent)
    return slurm if place in search_path("", None).split(":") else Slurm(place)


def _choose(site: DetectedCluster, name: str | None) -> Nodes:
    chosen = site.best(name)
    if chosen is None:
        known = ", ".join(n.label for n in site.partitions)
        raise ConfigError(f"--partition {name}: {site.cluster} has {known}")
    return chosen


def _profile_name(name: str) -> str:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"--name {name!r}: use letters, digits, '-' and '_'")
    return name


def _refuse_shadowing(name: str, *, given: bool) -> None:
    if not given and (packaged_root() / "cluster-config" / f"{name}.yaml").is_file():
        raise ConfigError(
            f"trnslurm includes a profile named {name}, which yours would hide: pass --name"
        )


def _print_site(site: DetectedCluster, chosen: Nodes) -> None:
    click.echo(f"{site.cluster}, accounting {'on' if site.accounting else 'off'}\n")
    columns: dict[str, Callable[[Nodes], str]] = {
        "partition": lambda n: f"{n.label} *" if n is chosen else n.label,
        "nodes": lambda n: str(n.full_nodes),
        "instance type": lambda n: n.instance_type or "?",
        "cpus": lambda n: str(n.cpus),
        "gpus": lambda n: f"{n.gpus} (MIG)" if n.sliced else str(n.gpus),
        "max minutes": lambda n: str(n.max_time_min or "-"),
    }
    echo_table(*cells_of(columns, site.partitions), right="nodes,cpus,gpus,max minutes")
    click.echo("\n* used by --write unless you pass --partition")
    if hidden := sorted({n.name for n in site.partitions if n.hidden}):
        click.echo(f"{', '.join(hidden)}: hidden by the site; choose one with --partition")
    for name, why in {n.name: n.unusable for n in site.partitions if n.unusable}.items():
        click.echo(f"{name} does not accept your jobs: {why}")


def write_profile(name: str, text: str, warning: str) -> None:
    """Write a profile to the user's cluster-config/, and print its warning."""
    target = user_root() / "cluster-config" / f"{_profile_name(name)}.yaml"
    settings = user_root() / SETTINGS_FILE
    try:
        # The same text: the first call was killed before it wrote the settings.
        if target.exists() and target.read_bytes() != text.encode():
            raise ConfigError(f"{target} already exists: remove it, or pass --name")
        make_private(target.parent)
        write_file(target, text.encode())
        chosen = not settings.exists()
        if chosen:
            write_file(settings, f"cluster: {target.stem}\n".encode())
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    now = f"; {target.stem} is now the default cluster, set in {settings}" if chosen else ""
    click.echo(f"Wrote {target}{now}.")
    click.echo("Check its run_root and python, then run: trnslurm env check")
    if warning:
        click.echo(warning, err=True)


@click.group("env")
def env_command() -> None:
    """Check the Python environment on the nodes.

    \b
    Example:
      trnslurm env check --cluster trn1
    """


@env_command.command("check")
@workspace_option
@cluster_option
@click.option("--timeout", default=600.0, help="Number of seconds to wait for a node.")
@json_option
def check_command(
    workspace: Workspace, cluster: str | None, timeout: float, console: Terminal
) -> None:
    """Start the profile's Python on a node, and compare its packages with those that jobs need.

    \b
    Example:
      trnslurm env check --cluster trn1
    """
    name = cluster or workspace.cluster or "local"
    profile: Cluster = resolve_cluster(workspace, name)
    instance = find(catalog(profile.instance_types), profile.instance_type)
    device = device_of(profile, instance)
    report = check_environment(profile, device, timeout)
    if console.as_json:
        echo_json(report)
    else:
        sdk = f", for Neuron SDK {report['neuron_sdk']}" if report["neuron_sdk"] else ""
        click.echo(f"{report['host']}: Python {report['python']}, {report['executable']}{sdk}\n")
        rows = [(n, v or "missing") for n, v in report["packages"].items()]
        echo_table(("package", "version"), rows)
    if report["problems"]:
        raise TrnslurmError("; ".join(report["problems"]))


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    Example:
      trnslurm completion bash >> ~/.bashrc
    """
    click.echo(completion_script(shell))


def completion_script(shell: str) -> str:
    """Return the script with which a shell asks trnslurm for completions."""
    made = get_completion_class(shell)
    assert made is not None
    source = made(cli, {}, "trnslurm", "_TRNSLURM_COMPLETE").source()
    if shell == "bash":  # no space after KEY=, where a value follows
        ends = "    return 0\n"
        source = source.replace(ends, f"    [[ $COMPREPLY == *= ]] && compopt -o nospace\n{ends}")
    return source
