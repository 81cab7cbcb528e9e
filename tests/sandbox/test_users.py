"""Two users of one cluster, with real ids on a real Slurm: what one can do to the other.

The table of docs/security.md is tried row by row. Alice works; bob is the hostile neighbour, and a
colleague: both are in the group `team`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.namespaces import enter, login_environment

from ..processes import Done, processes_with, run_process
from ..waiting import eventually
from .cluster import AT_ONCE, CHECKOUT, Sandbox
from .jobs import SITE

pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users"),
]

PAGE = CHECKOUT / "docs/security.md"
WAITS = ("--set", "train.wait=true")


@dataclass
class Town:
    """The sandbox, the directories that its users share, and what alice has started there."""

    sandbox: Sandbox
    above: Path
    """Holds what is below."""
    runs: Path
    """A run root for all: root's, mode 1777."""
    team: Path
    """A run root of the group: root's, mode 3770."""
    cache: Path
    """A compile cache of the group: root's, mode 2770."""
    started: dict[str, Path] = field(default_factory=dict)
    """Alice's runs by name."""

    def home(self, user: str) -> Path:
        return self.sandbox.path / "home" / user

    def run(self, user: str, *argv: object, umask: int = 0o022) -> Done:
        """Run a command as a user on the head node; like `exec --user`, but at once."""
        layout = Layout(self.sandbox.path)
        environ = login_environment(layout, user, sys.executable) | {"PYTHONPATH": str(CHECKOUT)}
        words = enter(layout, [str(word) for word in argv], user=user)
        return run_process(words, env=environ, cwd="/", umask=umask)

    def shell(self, user: str, script: str) -> Done:
        return self.run(user, "sh", "-c", script)

    def trnslurm(self, user: str, *words: object, umask: int = 0o022) -> Done:
        return self.run(user, sys.executable, "-m", "trnslurm", *words, umask=umask)

    def submit(self, user: str, name: str, root: Path, *words: object, umask: int = 0o022) -> Done:
        options = ("--path", SITE, "--set", f"python={sys.executable}", "--name", name, "-y")
        root_option = ("--set", f"run_root={root}")
        return self.trnslurm(user, "submit", "probe", *options, *root_option, *words, umask=umask)

    def submitted(self, user: str, name: str, root: Path, *words: object, umask: int = 0) -> Path:
        """Submit a run, which must be accepted; whatever the user's umask."""
        said = self.submit(user, name, root, *words, "--json", umask=umask)
        return Path(json.loads(said.ok)["directory"])

    def compiling(self) -> tuple[str, ...]:
        """Options of a job whose graphs lie in the team's cache, where both trust each other."""
        sets = (f"compile_cache={self.cache}", "compile_trust=[alice,bob]", "precompile=auto")
        return tuple(word for setting in sets for word in ("--set", setting))

    def job(self, run: Path, phase: str = "train") -> str:
        return str(json.loads((run / "run.json").read_text())["jobs"][phase])

    def until(self, run: Path, state: str) -> None:
        def is_so() -> bool:
            """the run is in that state"""
            try:
                seen = json.loads((run / "state/train-1.json").read_text())["state"]
            except (FileNotFoundError, ValueError):
                seen = ""
            assert seen == state or seen in ("", "STARTING", "RUNNING"), self.story(run)
            return bool(seen == state)

        eventually(is_so)

    def until_there(self, run: Path) -> None:
        def is_so() -> bool:
            """its worker waits"""
            return any(run.glob("facts-train-*"))

        eventually(is_so)

    def story(self, run: Path) -> str:
        return "\n".join(log.read_text(errors="replace") for log in (run / "logs").glob("*.log"))


def make_reachable(town: Town, paths: list[Path]) -> None:
    """Have the sandbox's users reach directories that lie in one of root's own, as /root.

    Only there, by mounts: on this machine nothing changes.
    """
    closed: dict[Path, list[Path]] = {}
    for path in paths:
        for place in [*path.parents][::-1]:
            if not place.stat().st_mode & stat.S_IXOTH:
                closed.setdefault(place, []).append(path)
                break
    lines = ["set -e"]
    for top, below in closed.items():
        for n, path in enumerate(below):
            kept = town.above / f"kept{len(lines)}-{n}"
            kept.mkdir()
            lines.append(f"mount --bind '{path}' '{kept}'")
        mounts = [line.split("'")[1::2] for line in lines[-len(below) :]]
        lines.append(f"mount -t tmpfs -o mode=0755 tmpfs '{top}'")
        lines += [f"mkdir -p '{path}' && mount --bind '{kept}' '{path}'" for path, kept in mounts]
    done = town.sandbox.trnslurm("exec", "--", "sh", "-c", "umask 022\n" + "\n".join(lines))
    assert done.code == 0, done


@pytest.fixture(scope="module")
def town() -> Iterator[Town]:
    above = Path(tempfile.mkdtemp(dir="/tmp", prefix="tn-"))
    above.chmod(0o755)
    sandbox = Sandbox(base=above / "b")
    try:
        shared = "PartitionName=shared Nodes=ALL OverSubscribe=FORCE:2 State=UP"
        options = ("--nodes", 2, "--users", 2, "--set", AT_ONCE, "--set", "KillWait=5")
        options += ("--set", shared)
        # No Python: until `make_reachable`, ours may be root's alone. Each job names it.
        up = sandbox.trnslurm("up", "-q", "--python", "/bin/sh", *options)
        assert (up.code, up.err) == (0, "")
        town = Town(sandbox, above, *(above / name for name in ("runs", "team", "cache")))
        for directory, mode in ((town.runs, 0o1777), (town.team, 0o3770), (town.cache, 0o2770)):
            directory.mkdir()
            gid = 0 if directory == town.runs else int(sandbox.trnslurm(
                "exec", "--", "sh", "-c", "getent group team | cut -d: -f3").ok)  # fmt: skip
            os.chown(directory, 0, gid)
            directory.chmod(mode)
        make_reachable(town, [Path(sys.base_prefix), Path(sys.prefix), CHECKOUT])
        town.started = {
            "open": town.submitted(
                "alice", "open", town.team, "--set", "group_readable=true", *WAITS
            ),
            "private": town.submitted("alice", "private", town.team, *town.compiling()),
            "shared": town.submitted(
                "alice", "shared", town.runs, "--set", "slurm.sbatch=['--hold']"
            ),
        }
        town.until_there(town.started["open"])
        town.until(town.started["private"], "COMPLETED")
        yield town
    finally:
        sandbox.trnslurm("down")
        left = sandbox.base.exists(), processes_with(str(sandbox.base))
        shutil.rmtree(above)
    assert left == (False, [])
    assert str(above) not in Path("/etc/passwd").read_text()


# What bob tries, in the words of the table's first column.
TRIED: dict[str, Callable[[Town], None]] = {}


def tried(row: str) -> Callable[[Callable[[Town], None]], Callable[[Town], None]]:
    def add(check: Callable[[Town], None]) -> Callable[[Town], None]:
        TRIED[row] = check
        return check

    return add


def rows() -> list[str]:
    """The first column of the page's table."""
    section = PAGE.read_text().partition("## What one user can do to another")[2].partition("\n## ")
    return re.findall(r"^\| (?!bob tries to)([^|-][^|]*?) \|", section[0], re.MULTILINE)


@pytest.mark.parametrize("row", rows())
def test_row(town: Town, row: str) -> None:
    TRIED[row](town)


def test_table_is_whole() -> None:
    assert sorted(rows()) == sorted(TRIED)


def modes(run: Path) -> set[int]:
    """The modes of everything in a run; the setgid bit passes on the group of its root."""
    found = (run, *run.rglob("*"))
    return {p.stat().st_mode & 0o5777 for p in found if not p.is_symlink()}


@tried("read a private run: `status`, `logs`, its files")
def _(town: Town) -> None:
    run = town.started["private"]
    for command in ("status", "logs", "metrics", "triage", "cancel", "export"):
        assert "Permission denied" in town.trnslurm("bob", command, run).error, command
    assert town.run("bob", "cat", run / "run.json").code == 1
    assert modes(run) <= {0o700, 0o600, 0o660}  # the last: of a trial, as open as the cache
    assert "private" not in town.trnslurm("bob", "runs", "--all").out


@tried("read a run with `group_readable`, as a member of alice's group")
def _(town: Town) -> None:
    run = town.started["open"]
    assert town.trnslurm("bob", "status", run).ok.startswith(f"{run.name}: RUNNING")
    assert "train: node 0 of 1" in town.trnslurm("bob", "logs", run).ok
    assert modes(run) == {0o750, 0o640}
    assert {p.stat().st_gid for p in run.rglob("*")} == {town.team.stat().st_gid}


@tried("change such a run: its files, its state, a stop file for its workers")
def _(town: Town) -> None:
    run = town.started["open"]
    for umask in (0o000, 0o002, 0o077):
        for words in (("note", run, "text"), ("keep", run), ("stacks", run), ("exec", run, "--",
                      sys.executable, "-c", f"open('{run}/by-hand', 'w')")):  # fmt: skip
            assert town.trnslurm("alice", *words, umask=umask).code == 0
        assert modes(run) == {0o750, 0o640}
    assert not [*run.rglob("__pycache__")]
    names = ("state/stop-train-1.json", "state/heartbeat", "metrics.jsonl", "go", "run.json")
    places = " ".join(str(run / name) for name in names)
    script = f"for f in {places}; do (: >> $f) && exit 3; done; mv {run} {run}x || rm -r {run}"
    assert town.shell("bob", script).code == 1
    assert town.trnslurm("alice", "status", run).ok.startswith(f"{run.name}: RUNNING")


@tried(
    "make her commands run a file that an older version left writable for him "
    "and that he has changed"
)
def _(town: Town) -> None:
    run = town.started["open"]
    pyc = run / "code/trnslurm/__pycache__/frozen.pyc"
    for file, words in ((run / "run.json", ("status", run)), (pyc.parent, ("stacks", run))):
        script = f"mkdir -p {pyc.parent}; chmod g+w {file}"
        assert town.shell("alice", script).code == 0
        assert town.shell("bob", f"echo >> {run}/run.json || touch {pyc}").code == 0
        said = town.trnslurm("alice", *words).error
        assert said.startswith(f"users other than its owner can write to {file}")
        assert town.shell("alice", f"chmod g-w {file}").code == 0
    assert f"{pyc} belongs to bob" in town.trnslurm("alice", "stacks", run).error
    assert town.shell("alice", f"rm -r {pyc.parent}").code == 0
    assert town.trnslurm("alice", "stacks", run).code == 0


@tried("`cancel`, `resume`, `export` or `exec` a run of hers")
def _(town: Town) -> None:
    run = town.started["open"]
    for command in (("cancel", run), ("resume", run), ("export", run), ("exec", run, "--", "id")):
        said = town.trnslurm("bob", *command).error
        assert said.startswith(f"{run} belongs to alice, and its commands would run as you")


@tried("cancel, modify or enter its jobs with Slurm's own commands; impersonate alice to Slurm")
def _(town: Town) -> None:
    run = town.started["open"]
    job = town.job(run)
    for command in (
        f"scancel {job}", f"scontrol requeue {job}", f"scontrol hold {job}",
        f"scontrol update JobId={job} TimeLimit=1", f"scontrol write batch_script {job} -",
        f"srun --overlap --jobid={job} id", "sbatch --uid=alice --wrap id",
    ):  # fmt: skip
        done = town.run("bob", *command.split())
        assert re.search("denied|Invalid user id|only .* root", done.err) and not done.out, done
    assert town.run("alice", "squeue", "-ho%T", f"-j{job}").ok == "RUNNING\n"


@tried("signal its processes, or read their environment")
def _(town: Town) -> None:
    inside = "for p in $(pgrep -u alice); do kill -9 $p || cat /proc/$p/environ; done"
    found = town.sandbox.state()["nodes"]
    number = next(n["number"] for n in found if n["state"].startswith(("alloc", "mixed")))
    words = ("exec", "--node", number, "--user", "bob", "--", "sh", "-c", inside)
    done = town.sandbox.trnslurm(*words)
    assert (done.out, "not permitted" in done.err, "denied" in done.err) == ("", True, True)
    assert town.trnslurm("alice", "status", "open").ok.startswith(town.started["open"].name)


@tried("see the names, directories and nodes of her jobs in `squeue`")
def _(town: Town) -> None:
    job = town.job(town.started["open"])
    assert town.run("bob", "squeue", "-ho%j %Z", f"-j{job}").ok == (
        f"open-train {town.started['open']}\n"
    )


@tried("make her submit to a run root or a link that belongs to him")
def _(town: Town) -> None:
    (own := town.above / "bobs").mkdir()
    os.chown(own, town.home("bob").stat().st_uid, -1)
    assert town.shell("bob", f"ln -s {town.team} {town.runs}/link; chmod 777 {own}").code == 0
    for root in (own, town.runs / "link"):
        assert "belongs to another user" in town.submit("alice", "x", root).err


@tried("make her submit his bundle, or a bundle that he can change")
def _(town: Town) -> None:
    bundle = town.above / "bobs/bundle"
    words = ("render", "probe", "--path", SITE, "-o", bundle)
    assert town.trnslurm("bob", *words).code == 0
    said = town.trnslurm("alice", "submit", "--rendered", bundle).error
    assert f"{bundle} belongs to bob" in said
    # Her files, in a directory of his.
    os.chown(bundle, town.home("alice").stat().st_uid, -1)
    for path in bundle.rglob("*"):
        if path.is_file():
            os.chown(path, town.home("alice").stat().st_uid, -1)
    said = town.trnslurm("alice", "submit", "--rendered", bundle).error
    assert f"{bundle}/code belongs to bob" in said


@tried("put fake runs into a shared run root: pipes, devices, links, directories")
def _(town: Town) -> None:
    script = f"""
    cd {town.runs}
    for n in 1 2 3 4 5 6; do mkdir -p -m 755 2099123$n-000000-bad$n/state; done
    mkfifo 20991231-000000-bad1/run.json
    ln -s /dev/zero 20991232-000000-bad2/run.json
    mkdir 20991233-000000-bad3/run.json
    head -c 200000 /dev/zero | tr '\\0' '[' > 20991234-000000-bad4/run.json
    ln -s 20991235-000000-bad5 20991235-000000-bad5/run.json
    cp {town.started["open"]}/run.json 20991236-000000-bad6/
    cd 20991236-000000-bad6
    mkdir logs
    mkfifo metrics.jsonl state/train-1.json state/heartbeat logs/train-1-node0.log
    ln -s /dev/zero state/cancelled.json
    chmod -R a+rX .
    chmod 700 ../20991233-000000-bad3"""
    assert town.shell("bob", script).code == 0
    seen = town.trnslurm("alice", "runs")
    assert (seen.code, town.started["shared"].name in seen.out) == (0, True), seen
    assert not town.trnslurm("alice", "status", "last").ok.startswith("2099")
    bad = town.runs / "20991236-000000-bad6"
    assert town.trnslurm("alice", "status", bad).ok.startswith(bad.name)
    assert "not a regular file" in town.trnslurm("alice", "logs", bad).error


@tried("link from there to one of her runs, under a newer name")
def _(town: Town) -> None:
    link = town.runs / "20991231-000000-shared"
    assert town.shell("bob", f"ln -s {town.started['shared']} {link}").code == 0
    assert not town.trnslurm("alice", "status", "last").ok.startswith("2099")
    for command in ("cancel", "resume"):
        assert f"{link} belongs to bob" in town.trnslurm("alice", command, link).error


@tried("move or delete a run there")
def _(town: Town) -> None:
    run = town.started["shared"]
    done = town.shell("bob", f"mv {run} {run}x || rm -r {run} || rmdir {run}")
    assert (done.code != 0, run.is_dir()) == (True, True)


@tried("create that root's default compile cache, so that he owns it")
def _(town: Town) -> None:
    there = len([*town.runs.iterdir()])
    assert town.run("bob", "mkdir", "-p", town.runs / ".compiled/trnslurm").code == 0
    said = town.submit("alice", "cold", town.runs, "--set", "precompile=auto")
    place = town.runs / ".compiled/trnslurm"
    assert said.err.splitlines()[-1] == (
        f"error: {place}: belongs to bob, whom compile_trust does not name: set compile_cache to a "
        "directory of your own"
    )
    assert len([*town.runs.iterdir()]) == there + 1


@tried("put graphs or a claim for one of her keys into a shared cache")
def _(town: Town) -> None:
    """A copy of what was compiled for alice is the best that he can offer."""
    (cache := town.above / "planted").mkdir()
    cache.chmod(0o1777)
    (cache / "trnslurm").mkdir()
    (cache / "trnslurm").chmod(0o1777)  # an admin's, so that keys have owners of their own
    (made,) = (town.cache / "trnslurm").iterdir()
    key = cache / "trnslurm" / made.name
    assert town.run("bob", "cp", "-r", made, key).code == 0
    options = ("--set", f"compile_cache={cache}", "--set", "precompile=auto")
    refused = "belongs to bob, whom compile_trust does not name"
    assert refused in town.submit("alice", "cold", town.runs, *options).err
    # A claim alone, of a job that runs; and links where her files would be.
    script = (
        f"rm -r {key}/manifest.json {key}/xla && ln -s {town.home('alice')} {key}/.claim-2.json"
    )
    assert town.shell("bob", script).code == 0
    assert refused in town.submit("alice", "cold", town.runs, *options).err
    assert town.shell("bob", f"rm -r {key}").code == 0
    held = ("--set", "slurm.sbatch=['--hold']")
    assert town.submit("alice", "cold", town.runs, *options, *held).code == 0
    assert key.stat().st_mode & 0o777 == 0o755  # nobody plants anything beside hers
    assert town.run("bob", "touch", key / ".claim-1.json").code == 1


@tried("make her `compile gc` delete the target of a link in a cache")
def _(town: Town) -> None:
    home = town.home("alice")
    cache = home / "trnslurm-runs/.compiled/trnslurm"
    script = f"mkdir -p {home}/precious {cache} && echo yes > {home}/precious/manifest.json"
    assert town.shell("alice", f"{script} && chmod 711 {home} && chmod 1777 {cache}").code == 0
    assert town.shell("bob", f"ln -s {home}/precious {cache}/{16 * 'a'}").code == 0
    said = town.trnslurm("alice", "compile", "gc", "--max-size", "0", "--yes")
    assert (said.out, said.code) == ("Nothing to remove\n", 0)
    assert (home / "precious/manifest.json").exists()


@tried("use her graphs, if `compile_trust` names both users")
def _(town: Town) -> None:
    run = town.submitted("bob", "warm", town.team, *town.compiling())
    assert not (run / "state/precompile-1.json").exists()
    assert json.loads((run / "run.json").read_text())["jobs"].keys() == {"train"}
    town.until(run, "COMPLETED")
    touched = next(town.cache.glob("trnslurm/*/used"))
    assert touched.stat().st_mode & 0o777 == 0o660


@tried("create the work directory for data that she prepares, in a shared data root")
def _(town: Town) -> None:
    code = (
        "from pathlib import Path; from trnslurm.prepare.files import partial\n"
        f"with partial(Path('{town.runs}/text'), 'key') as place: print(place)"
    )
    place, home = town.runs / ".text.partial-key", town.home("alice")
    assert town.run("alice", sys.executable, "-c", code).out == f"{place}\n"
    for plant in (f"mkdir -m 777 {place}", f"ln -s {home} {place}"):
        assert town.shell("bob", plant).code == 0
        assert f"{place} belongs to another user" in (
            town.run("alice", sys.executable, "-c", code).err
        )
        assert town.shell("bob", f"rm -r {place}").code == 0
    assert not (home / "lock").exists()


@tried("end her run on this machine, without Slurm")
def _(town: Town) -> None:
    words = ("--cluster", "local", "--detach", "--set", "group_readable=true", *WAITS)
    run = town.submitted("alice", "local", town.team, *words)
    town.until_there(run)
    pid = town.job(run, "local").partition("@")[0]
    assert f"{run} belongs to alice" in town.trnslurm("bob", "cancel", run).error
    assert town.run("bob", "kill", pid).code == 1
    assert town.trnslurm("bob", "status", run).ok.startswith(f"{run.name}: RUNNING")
    assert town.trnslurm("alice", "cancel", run).code == 0


@tried("control the sandbox, or shut it down")
def _(town: Town) -> None:
    base = f"TRNSLURM_SANDBOXES={town.sandbox.base} {sys.executable} -m trnslurm sandbox"
    for words in ("fault 1 power-off", "down", "exec --user alice -- id"):
        done = town.shell("bob", f"{base} {words}")
        assert (done.code, done.err[:7]) == (1, "error: "), done
    assert town.run("bob", "touch", town.sandbox.path / "x").code == 1
    assert town.sandbox.trnslurm("status").code == 0
    done = town.sandbox.trnslurm("exec", "--user", "bob", "--", "sh", "-c", "id -un; pwd; umask")
    assert done.ok == f"bob\n{town.home('bob')}\n{done.out.splitlines()[2]}\n"


def test_names_are_completed(town: Town) -> None:
    words = {"COMP_WORDS": "trnslurm sandbox exec --user b", "COMP_CWORD": "4"}
    completing = words | {"_TRNSLURM_COMPLETE": "bash_complete"}
    argv = [sys.executable, "-m", "trnslurm"]
    assert town.sandbox.run(argv, environ=completing).out == "plain,bob\n"


def test_users_stay_when_the_machine_gets_one(town: Town) -> None:
    """useradd replaces /etc/passwd, and a mount on it would go with the old file."""
    mounts = town.sandbox.trnslurm("exec", "--", "findmnt", "-nro", "TARGET,FSTYPE").ok.splitlines()
    assert "/etc overlay" in mounts
    assert not {"/etc/passwd", "/etc/group"} & {line.split()[0] for line in mounts}


def test_a_restart_beside_the_job_of_another_user(town: Town) -> None:
    """On the same node: bob's workers die and start again, alice's stay the same processes."""
    sets = ("slurm.partition=shared", "slurm.exclusive=false", "train.wait=true")
    words = [word for setting in sets for word in ("--set", setting)]
    crash = ("--set", "train.save=[1]", "--set", "train.fail_attempts=[1]")
    hers = town.submitted("alice", "beside", town.runs, *words)
    town.until_there(hers)
    node = json.loads(next(hers.glob("facts-train-*")).read_text())["host"]
    his = town.submitted(
        "bob", "restarts", town.runs, *words, *crash, f"--sbatch=--nodelist={node}"
    )
    town.until_there(his)

    def processes(user: str) -> str:
        ps = ("exec", "--node", node, "--", "ps", "--no-headers", "-o", "pid,args", "-u", user)
        return town.sandbox.trnslurm(*ps).out

    before = processes("alice")
    assert "code/jobs/probe/train.py" in before
    (his / "go-1").touch()
    eventually(lambda: (his / "facts-train-2-0.json").exists(), said=lambda: town.story(his))
    assert json.loads((his / "state/train-1.json").read_text())["state"] == "RESTARTED"
    assert processes("alice") == before
    for run in (his, hers):
        (run / "go").touch()
    for user in ("alice", "bob"):
        eventually(lambda user=user: processes(user) == "", said=lambda: processes("bob"))
    assert town.sandbox.trnslurm("exec", "--node", node, "--", "ls", "/dev/shm").ok == ""


def test_what_is_left_of_an_ordinary_day(town: Town) -> None:
    """Alice's own commands have worked all the while."""
    for name in ("open", "shared"):
        assert town.trnslurm("alice", "cancel", town.started[name], "--now").code == 0
