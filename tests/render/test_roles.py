"""Roles: how a recipe says them, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trnslurm.config.catalog import catalog

SERVE = 'roles.rollout.command=[python, serve.py, --port, "{port}"]'
SLURM = ("--cluster", "pc", "--set", "device=cuda", "--set", "instance_type=p4d.24xlarge")
TIME = ("--time", "60")
APART = 'roles.rollout={partition: cpu, nodes: 3, command: [python, serve.py, --port, "{port}"]}'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a trainer and a server, in which the user stands."""
    for name in ("train.py", "serve.py"):
        (tmp_path / "project" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "project" / name).touch()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def settings(*words: str) -> list[str]:
    return [part for word in words for part in ("--set", word)]


def test_roles_are_more_nodes_of_the_job(site, cli, project) -> None:
    roles = settings(
        SERVE, "roles.rollout.nodes=2", "roles.rollout.spares=1", "roles.rollout.ready_min=2",
        'roles.reward.command=[torchrun, reward.py, --of, "{rollout.urls}"]', "slurm.spares=1",
        "slurm.max_nodes=7",
    )  # fmt: skip
    out = site.root / "out"
    words = ("./train.py", *SLURM, *TIME, "--nodes", "2", *roles)
    done = cli("render", *words, "-o", str(out), "--", "--servers={rollout.urls}", "{model.name}")
    assert done.code == 0, done.err
    script, node = ((out / name).read_text() for name in ("train.sbatch", "node.sh"))
    assert "#SBATCH --nodes=7\n" in script and "#SBATCH --no-kill" in script
    assert "rollout=$(cut -d , -f 4-6" in script and "reward=$(cut -d , -f 7-7" in script
    assert " --spares=1 " in script and " --served=4 " in script
    # Other braces have no meaning.
    assert '--servers="$TRNSLURM_ROLE_ROLLOUT_URLS"' in node and "'{model.name}'" in node
    server = (out / "roles/rollout.sh").read_text()
    assert '"$TRNSLURM_PYTHON" serve.py --port "$TRNSLURM_PORT"' in server
    reward = (out / "roles/reward.sh").read_text()
    assert '(torchrun reward.py --of "$TRNSLURM_ROLE_ROLLOUT_URLS")' in reward
    assert json.loads((out / "roles.json").read_text()) == {
        "rollout": {
            "nodes": 2, "spares": 1, "ready": "tcp", "ready_s": 120.0, "restart": "alone",
            "needs": [], "partition": "", "component": 0,
        },
        "reward": {
            "nodes": 1, "spares": 0, "ready": "", "ready_s": 600.0, "restart": "alone",
            "needs": ["rollout"], "partition": "", "component": 0,
        },
    }  # fmt: skip
    said = cli("submit", *words, "--dry-run").out
    assert "and 1 spare, 2 nodes of rollout and 1 spare, 1 node of reward" in said
    assert "at most 7.0 node-hours" in said
    assert " 7.0 " in cli("plan", *words).out


@pytest.mark.parametrize(
    "words, said",
    [
        (settings("roles.rollout.nodes=2"), "roles.rollout has no command: set roles.ro"),
        (settings("roles.Roll.nodes=2"), "roles.Roll: a role name must be 1 to 20 lowercase "),
        (settings("roles.train.nodes=2"), "lowercase letters and must not be one of train"),
        (settings("roles.rollout.nodes=0"), "roles.rollout.nodes is 0; it must be at least 1"),
        (settings("roles.rollout.node=2"), 'unknown key roles.rollout.node (did you mean "roles.'),
        (settings("roles.rollout.command=[./gone.py]"), "command: gone.py is not in the project"),
        (settings("roles.rollout.command=[python]"), "command: python can start only"),
        (settings('roles.rollout.command=[""]'), "roles.rollout.command: its first word is empty"),
        (settings("roles.rollout.command=[serve]", "roles.rollout.ready=tcp"), "not use {port}"),
        (settings('roles.rollout.command=[serve, "{rollout.url}"]'), "its own address as {host}"),
        (settings('roles.rollout.command=[serve, "{x}"]'), "'{x}': unknown placeholder {x}"),
        (
            settings('roles.a.command=[serve, "{b.url}"]', 'roles.b.command=[serve, "{a.url}"]'),
            "roles: a and b are waiting for each other's addresses",
        ),
        ([*settings(SERVE), "--", "{rollout.uls}"], 'placeholder {rollout.uls} (did you mean "u'),
        ([*settings(SERVE), "--", "{port}"], "argument '{port}': unknown placeholder {port}"),
        (settings(SERVE, "roles.rollout.spares=1"), "roles with spares: a job ends if its first"),
        ([*settings(SERVE, "slurm.max_nodes=9"), "--nodes", "2-4"], "pass a single number to "),
        (settings(SERVE, "slurm.max_nodes=1"), "--nodes 1 and 1 for roles is more than slurm.max"),
        (settings(SERVE, "roles.rollout.sbatch=[--qos=x]"), "have their own options: set roles"),
        (settings(APART, "slurm.spares=1", "slurm.min_nodes=1"), "omit --spares and the roles' s"),
        ([*settings(APART, "roles.rollout.spares=1"), "--nodes", "2"], "the roles' spares"),
        (settings(APART, "slurm.max_cost=5"), "max_cost: the price of nodes in a role's own part"),
        (
            settings(APART, "roles.rollout.sbatch=[--part=x]"),
            "roles.rollout.sbatch --part=x: use roles.rollout.partition",
        ),
        (
            settings(APART, "roles.rollout.sbatch=[--time=9]"),
            "roles.rollout.sbatch --time=9: use --time",
        ),
        (settings(APART, "roles.rollout.sbatch=[-q]"), "'-q': expected one long option, such as"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(site, cli, project, words: list[str], said: str) -> None:
    at = words.index("--") if "--" in words else len(words)
    done = cli("render", "./train.py", *SLURM, *TIME, *words[:at], "-o", "out", *words[at:])
    assert done.code == 1
    assert said in done.error
    assert not (project / "out").exists()


def test_nodes_of_another_partition_are_a_component_of_the_job(site, cli, project) -> None:
    """The limits and the price of the training's partition are not theirs."""
    roles = settings(
        APART, 'roles.judge={partition: cpu, command: [python, serve.py, "{port}"]}',
        "roles.reward={partition: a10, sbatch: [--gres=gpu:1, --cpus-per-task=8]}",
        "roles.reward.command=[serve]", "slurm.max_nodes=2", "slurm.mem_per_node_mib=9",
    )  # fmt: skip
    words = ("./train.py", *SLURM, *TIME, "--nodes", "2", *roles)
    done = cli("render", *words, "-o", "out")
    assert done.code == 0, done.err
    script = (project / "out/train.sbatch").read_text()
    first, *others = (
        [line.split(" ")[1] for line in part.splitlines() if line.startswith("#SBATCH ")]
        for part in script.split("#SBATCH hetjob\n")
    )
    assert "--nodes=2" in first and "--no-kill" not in first
    assert others == [
        ["--nodes=4", "--ntasks-per-node=1", "--partition=cpu", "--exclusive", "--mem=0"],
        ["--nodes=1", "--ntasks-per-node=1", "--partition=a10", "--gres=gpu:1",
         "--cpus-per-task=8"],
    ]  # fmt: skip
    assert " rollout=$(cut -d , -f 1-3 " in script and " judge=$(cut -d , -f 4-4 " in script
    said = cli("submit", *words, "--dry-run").out
    assert ", 3 nodes of rollout in partition cpu, 1 node of judge in partition cpu, 1 no" in said
    assert "at most 7.0 node-hours" in said
    said = cli("plan", *words).out
    price = catalog({})["p4d.24xlarge"].price_per_hour
    assert price and re.search(rf" 7\.0 +\${2 * price:.0f}\b", said), said
    assert "Cost: without the nodes of partition cpu, a10, whose price is unknown" in said


def test_on_one_machine_there_are_no_partitions(site, cli, project) -> None:
    done = cli("render", "./train.py", "--cluster", "local", *settings(APART), "-o", "out")
    assert done.code == 0, done.err
    assert "--het-group" not in (project / "out/train.sh").read_text()
    assert json.loads((project / "out/roles.json").read_text())["rollout"]["component"] == 0


def test_only_a_custom_script_has_roles(site, cli) -> None:
    done = cli("plan", "gpt2_zero1", "--cluster", "trn1", *settings("roles.a.command=[serve]"))
    assert "roles: only a custom script can have servers: see docs/roles.md" in done.error
