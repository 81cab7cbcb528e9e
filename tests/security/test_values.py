"""Hostile texts in every field, name and option: refused in one line, or nothing but text.

The fields are found by looking at the schema, the options by looking at the command line, so that
new ones are covered without a word here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from trnslurm.cluster.python import probe_script
from trnslurm.config.load import resolve
from trnslurm.config.schema import Cluster, Config, Recipe
from trnslurm.config.search import Workspace
from trnslurm.config.tree import flatten, lookup, merge, nest, plain
from trnslurm.config.values import check_cluster_values
from trnslurm.errors import TrnslurmError
from trnslurm.plan.data import Own, make_data_job
from trnslurm.plan.spec import make_spec
from trnslurm.render import job as job_room
from trnslurm.render.bundle import Bundle, snapshot
from trnslurm.render.job import render_data_job, render_job
from trnslurm.render.project import PROJECT_FACTS

from ..cli.test_surface import COMMANDS, VERBS
from .hostile import FIELDS, HOSTILE, MARK, filled

TOY: dict[str, Any] = {
    "steps": 3, "batch": {"global_batch": 64}, "data": {"path": "toy", "text": "text.txt"},
    "graphs": {"free": []},
}  # fmt: skip
# In the place of the nodes' Python: it says what the workers would have been started with.
PYTHON = """#!/bin/bash
case $2 in
  *.launcher) env -0 > "{out}/environment" ;;
  trnslurm.node.ports) echo 41001 41002 ;;
  trnslurm.node.address | trnslurm.node.attempt) exec "{python}" "$@" ;;
esac
"""
# Hostile ones are not there to be run; another test has them, by names that can be.
PROGRAMS = ("python", "slurm.bin_dir", "entry", "project", "links", "container.python")
COMMANDS_OF_A_NODE = {
    "srun": 'touch "logs/$TRNSLURM_PHASE-$TRNSLURM_ATTEMPT-node0.log"\n'
    "while [[ $1 == -* ]]; do shift; done\n"
    'SLURM_NODEID=0 exec "$@"\n',
    "scontrol": "case $2 in hostnames) printf 'node-1\\nnode-2\\n' ;;\n"
    '  node) echo "NodeName=$4 Arch=x NodeAddr=10.1.2.3 NodeHostName=$4 " ;; esac\n',
    "neuron_parallel_compile": 'exec "$@"\n',
    "sleep": "exec /bin/sleep 0.1\n",
}


class Attack:
    """A site whose recipe and profile are made hostile, and what its scripts do."""

    def __init__(self, site: Any, home: Path) -> None:
        self.site, self.home = site, home
        self.commands = home / "commands"
        self.commands.mkdir()
        for name, text in COMMANDS_OF_A_NODE.items():
            self._program(self.commands / name, f"#!/bin/bash\n{text}")
        self.python = self._program(
            home / "python", PYTHON.replace("{out}", str(home)).replace("{python}", sys.executable)
        )

    @staticmethod
    def _program(file: Path, text: str) -> Path:
        file.write_text(text)
        file.chmod(0o755)
        return file

    def config(self, changes: Mapping[type, Mapping[str, Any]], **names: str) -> Config:
        """Write recipe and profile with these changes, and resolve them."""
        profile = {
            "python": str(self.python), "compile_cache": str(self.home / "cache"),
            "slurm": {"partition": "compute", "time_min": 60, "bin_dir": str(self.commands)},
            "container": {"python": str(self.python)},
        }  # fmt: skip
        cluster, recipe = names.get("cluster", "pc"), names.get("recipe", "toy")
        self.site.profile(cluster, **merge(profile, changes.get(Cluster, {})))
        tree = merge(plain(TOY), {k: v for c, t in changes.items() if c is not Cluster
                                  for k, v in t.items()})  # fmt: skip
        self.site.recipe(yaml.safe_dump(tree), name=recipe)
        self.site.write(f"jobs/{recipe}/text.txt", "text\n")
        workspace = Workspace.discover([str(self.site.root)])
        return resolve(workspace, recipe, cluster=cluster, preset=names.get("preset"))

    def bundles(self, config: Config) -> list[Bundle]:
        """Render everything that can be made of a configuration."""
        templates = Workspace.discover([str(self.site.root)]).template_dirs()
        training = render_job(make_spec(config, 2), templates)
        return [training, render_data_job(make_data_job(config, Own()), templates)]

    def run(self, config: Config) -> Path:
        """Run all the scripts; nothing hostile happens. Return the training's directory."""
        for number, bundle in enumerate(self.bundles(config)):
            directory = self.home / f"bundle{number}"
            bundle.write(directory)
            for script in sorted(
                directory.glob("*.sbatch"), key=lambda s: s.name == "train.sbatch"
            ):
                _refuse_new_directives(script)
                said = self._bash([str(script)], directory)
                assert "syntax error" not in said, said
        self._bash(["-c", probe_script(config.cluster, ["torch"])], self.home)
        assert not list(self.home.rglob(MARK))
        return self.home / "bundle0"

    def _bash(self, words: list[str], directory: Path) -> str:
        environment = {
            "SLURM_SUBMIT_DIR": str(directory), "SLURM_JOB_ID": "4711", "PATH": os.environ["PATH"],
            "SLURM_JOB_NUM_NODES": "2" if "bundle0" in str(directory) else "1",
            "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_NTASKS": "2",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", *words], env=environment, cwd=directory, stdin=subprocess.DEVNULL, timeout=180,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return done.stdout.decode(errors="replace")

    def environment(self) -> dict[str, str]:
        """The environment of the workers."""
        pairs = (self.home / "environment").read_bytes().decode().split("\0")
        return dict(pair.split("=", 1) for pair in pairs if pair)


def _refuse_new_directives(script: Path) -> None:
    """Every line that sbatch reads has exactly one option."""
    for line in script.read_text().splitlines():
        if line and not line.startswith("#"):
            return  # sbatch reads no further
        if line.startswith("#SBATCH"):
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            assert len(words) == 1 and words[0].startswith("--"), line


@pytest.fixture
def attack(site, tmp_path: Path) -> Attack:
    home = tmp_path / "attack"
    home.mkdir()
    return Attack(site, home)


def _refusal(do: Callable[[], object]) -> str:
    """The one line that something is refused with; empty: it is not."""
    try:
        do()
    except TrnslurmError as error:
        return str(error) or "refused"
    return ""


def _entry_only(config: Config, **more: Any) -> dict[str, bytes]:
    """In the place of the snapshot, for speed."""
    facts = {PROJECT_FACTS: b'{"links": {}}'} if config.recipe.project else {}
    return {f"code/{config.code_name}/{config.recipe.entry}": b"", **facts}


@pytest.mark.parametrize("what", HOSTILE)
def test_every_field(attack: Attack, monkeypatch, what: str) -> None:
    text = HOSTILE[what]
    monkeypatch.setattr(job_room, "snapshot", _entry_only)
    changes = [
        (cls, nest(dotted, filled(dotted, hint, text, attack.home)))
        for cls, fields in FIELDS.items()
        for dotted, hint in fields.items()
    ]
    resolved = [c for c in changes if not _refusal(lambda c=c: attack.config(_joined([c])))]
    rendered = _accepted(attack, resolved)
    # A directory that a container mounts is made, if its name is not too long for that.
    apart = {*PROGRAMS} | ({"container.image"} if what == "long" else set())
    accepted = _joined([(c, t) for c, t in rendered if not {k for k, _ in flatten(t)} & apart])
    monkeypatch.setattr(job_room, "snapshot", snapshot)
    config = attack.config(accepted)
    run = attack.run(config)
    if what not in ("NUL", "surrogate"):
        assert accepted, "the attack reaches nothing"
    _assert_intact(attack, accepted, run)


def _joined(changes: Sequence[tuple[type, Any]]) -> dict[type, dict[str, Any]]:
    """Return all these changes as those of one configuration."""
    joined: dict[type, dict[str, Any]] = {}
    for cls, change in changes:
        joined[cls] = merge(joined.get(cls, {}), change)
    return joined


def _accepted(attack: Attack, changes: list[tuple[type, Any]]) -> list[tuple[type, Any]]:
    """Return the changes that can be rendered; those of a half that can be need no other look."""
    if not _refusal(lambda: attack.bundles(attack.config(_joined(changes)))):
        return changes
    half = len(changes) // 2
    return [*_accepted(attack, changes[:half]), *_accepted(attack, changes[half:])] if half else []


def _assert_intact(attack: Attack, accepted: Mapping[type, Any], run: Path) -> None:
    """What was accepted is what the files, and the workers, have."""
    saved = yaml.safe_load((run / "config.yaml").read_text())["config"]
    plan = json.loads((run / "plan.json").read_text())
    for tree in accepted.values():
        for key, value in tree.items():
            assert merge(saved, {key: value}) == saved
    for section in ("model", "train"):
        assert plan[section] == plan[section] | saved[section]
    seen = attack.environment()
    assert seen.get("A_VALUE") == lookup(saved, "env.A_VALUE")
    retry, flags = "--retry_failed_compilation", saved["neuron"]["cc_flags"]
    assert seen["NEURON_CC_FLAGS"] == (f"{retry} {flags}" if flags else retry)
    assert seen["NEURON_COMPILE_CACHE_URL"] == saved["compile_cache"]


# Those that a file system takes, and that differ as names.
NAMES = ("substitution", "backticks", "double quote", "single quote", "newline", "dash",
         "direction", "expression", "shell's own")  # fmt: skip


@pytest.mark.parametrize("what", NAMES)
def test_every_name(attack: Attack, what: str) -> None:
    """Those of recipe, preset, cluster, instance type, variable, job, entry; and the programs'."""
    text = HOSTILE[what]
    odd = attack.home / f"of {text}"
    odd.mkdir()
    programs = {
        "python": str(attack._program(odd / "python", attack.python.read_text())),
        "slurm": {"bin_dir": str(odd / "bin")},
    }
    inside = {"image": text, "python": programs["python"]}
    (odd / "bin").symlink_to(attack.commands)
    entry = {"entry": text}
    for recipe in ("toy", text):
        attack.site.write(f"jobs/{recipe}/{text}", "")
    sizes = {"vcpus": 4, "accelerators": 1, "workers": [2], "multi_node_workers": [2]}
    kind = {
        "instance_types": {text: sizes | {"device": "neuron", "host_gib": 8}},
        "instance_type": text,
    }
    tries: list[tuple[dict[type, Any], dict[str, str]]] = [
        ({Cluster: programs}, {}), ({Cluster: {"container": inside}}, {}), ({Recipe: entry}, {}),
        ({Cluster: kind}, {}),
        ({Cluster: {"env": {text: "x"}}}, {}), ({Recipe: {"neuron": {"env": {text: "x"}}}}, {}),
        ({}, {"recipe": text}), ({}, {"cluster": text}),
        ({Recipe: {"presets": {text: {}}}}, {"preset": text}),
    ]  # fmt: skip
    accepted: list[tuple[type, Any]] = []
    chosen: dict[str, str] = {}
    for changes, names in tries:
        if not _refusal(lambda c=changes, n=names: attack.bundles(attack.config(c, **n))):
            accepted += changes.items()
            chosen |= names
    if accepted or chosen:
        attack.run(attack.config(_joined(accepted), **chosen))
    else:
        assert not text.isprintable()


def _options() -> list[tuple[str, str]]:
    return [
        (name, option.opts[-1])
        for name in VERBS
        if not name.startswith("sandbox")
        for option in COMMANDS[name].params
        if isinstance(option, click.Option) and not option.is_flag
    ]


BENIGN = {
    "RECIPE": "toy", "RUN": "last", "RUNS": "last", "TARGET": "toy", "KEYS": "0123", "TEXT": "",
    "COMMAND": "true", "SHELL": "bash", "ARGUMENTS": "--lr=1", "NAME": "mine", "SWEEP": "last",
    "FILE": "job.sbatch",
}  # fmt: skip


@pytest.mark.parametrize(("command", "option"), _options())
def test_every_option(attack: Attack, fake_slurm, cli, command: str, option: str) -> None:
    attack.config({})
    Path("job.sbatch").write_text("#!/bin/bash\n#SBATCH --time=1\npython train.py '\x1b]0;x'\n")
    words = [
        BENIGN[str(p.name).upper()] for p in COMMANDS[command].params
        if isinstance(p, click.Argument)
    ]  # fmt: skip
    for text in ("$(touch PWNED)`touch PWNED`\"; touch PWNED; #'", "a\ntouch PWNED", "\x1b]0;x"):
        done = (
            cli(*command.split(), *words, "--cluster=pc", f"{option}={text}")
            if any(p.name == "cluster" for p in COMMANDS[command].params)
            else cli(*command.split(), *words, f"{option}={text}")
        )
        assert "Traceback" not in done.err and "\x1b" not in done.err + done.out
        assert sum(line.startswith("error: ") for line in done.err.splitlines()) <= 1
    assert fake_slurm.calls("sbatch") == [] or command == "submit"
    assert not list(Path.cwd().parent.rglob(MARK))


def test_variables_of_the_scripts_cannot_be_set(site) -> None:
    """The scripts have none that a user's `env` could overwrite, or would lose to them."""
    found: set[str] = set()
    templates = Path(__file__).parents[2] / "templates"
    for template in templates.rglob("*.j2"):
        # A loop over names ends before the user's `env` begins.
        code = [line.partition("#")[0] for line in template.read_text().splitlines()]
        found |= {name for line in code for name in re.findall(r"^ *([A-Za-z_]+)\+?=", line)}
    _, after = (templates / "batch.sbatch.j2").read_text().split("{% block variables %}")
    on_nodes = ("node.sh.j2", "node/*.j2", "launcher/*.j2", "device/*.node.j2", "batch/address.j2",
                "batch/container.j2")  # fmt: skip
    found_in = [f.read_text() for pattern in on_nodes for f in templates.glob(pattern)]
    assert len(found_in) > 15
    for text in (after, *found_in):
        exports = re.findall(r"(?m)^ *export (.*?)(?: #.*)?$", text)
        found |= {name for words in exports for name in re.findall(r"([A-Z][A-Z_]*)=", words)}
    found -= {"LD_LIBRARY_PATH"}  # made longer, before `env`
    # A default, which yields to `env`.
    found -= {n for text in found_in for n in re.findall(r'(TORCH_[A-Z_]+)="\$\{\1:-', text)}
    assert {"MASTER_ADDR", "TRNSLURM_HOSTS", "HOME", "TRNSLURM_COMMAND", "PJRT_DEVICE"} <= found
    for name in found:
        with pytest.raises(TrnslurmError, match=r"rely on it|set \S+ instead"):
            check_cluster_values({"env": {name: "x"}, "activate": [], "python": "python3",
                                  "slurm": {"bin_dir": None}, "compile_trust": []})  # fmt: skip
