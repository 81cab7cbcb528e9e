"""Where a sandbox is, how to see whether it is up, and what is on PATH then."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trnslurm.sandbox.configuration import profile
from trnslurm.sandbox.layout import Layout, all_layouts, base_dir
from trnslurm.sandbox.settings import SandboxSettings

from ..processes import run_process


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Path]:
    """A base directory, not made yet, with a path short enough for sockets."""
    above = Path(tempfile.mkdtemp(dir="/tmp", prefix="tl-"))
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(above / "b"))
    yield above / "b"
    shutil.rmtree(above)


class Prepared:
    """A sandbox that looks as if it were up: this process plays its holder."""

    def __init__(self, name: str = "sandbox", settings: SandboxSettings | None = None) -> None:
        self.layout = Layout.named(name)
        self.layout.path.parent.mkdir(mode=0o700, exist_ok=True)
        for directory in (self.layout.path, self.layout.profile.parent, self.layout.bin):
            directory.mkdir()
        settings = settings or SandboxSettings(nodes=3, python="/p/python")
        self.layout.settings.write_text(settings.to_json())
        self.layout.profile.write_text(profile(self.layout, settings))
        self.lock = os.open(self.layout.path, os.O_RDONLY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        net = Path("/proc/self/ns/net").readlink()
        self.layout.entry.write_text(f"{os.getpid()} {net}\n")

    def crash(self) -> None:
        """Release the lock, as the kernel does when the holder is killed."""
        os.close(self.lock)


@pytest.fixture
def prepare() -> Iterator[Callable[..., Prepared]]:
    made: list[Prepared] = []

    def make(*arguments) -> Prepared:
        made.append(Prepared(*arguments))
        return made[-1]

    yield make
    for sandbox in made:
        with_lock = Path(f"/proc/self/fd/{sandbox.lock}")
        if with_lock.is_symlink() and with_lock.readlink() == sandbox.layout.path:
            sandbox.crash()


# names


def test_names_of_the_cluster() -> None:
    assert Layout.named("sandbox").cluster == "sandbox"
    assert Layout.named("drill").cluster == "sandbox-drill"
    assert Layout.named("sandbox-x").cluster == "sandbox-sandbox-x"
    assert Layout.named("0" * 20).name == "0" * 20


def test_what_is_no_sandbox_is_not_listed(cli, base: Path, prepare) -> None:
    prepare("drill")
    (base / "NOT-A-NAME").mkdir()
    (base / "file").write_text("")
    assert [layout.name for layout in all_layouts()] == ["drill"]


# up, starting, crashed


def listed(cli) -> dict[str, str]:
    return {row["name"]: row["state"] for row in json.loads(cli("sandbox", "list", "--json").out)}


def test_up_then_crashed(cli, prepare, stable) -> None:
    sandbox = prepare()
    assert sandbox.layout.is_up()
    assert listed(cli) == {"sandbox": "up"}
    stable.json("sandbox list", json.loads(cli("sandbox", "list", "--json").out))
    assert "sandbox" in cli("clusters").out
    sandbox.crash()
    assert not sandbox.layout.is_up()
    assert listed(cli) == {"sandbox": "crashed"}
    assert "sandbox" not in cli("clusters").out
    error = cli("plan", "gpt2_zero1", "--cluster", "sandbox").error
    assert error == "cluster 'sandbox' is not running: start it with `trnslurm sandbox up`"
    for command in ("status", "env", "exec true", "fault ctld kill"):
        words = "sandbox sandbox is not running: start it with `trnslurm sandbox up`"
        assert cli("sandbox", *command.split()).error == words


def test_held_without_an_entry_is_starting(cli, prepare) -> None:
    sandbox = prepare("drill")
    sandbox.layout.entry.unlink()
    assert sandbox.layout.is_held()
    assert not sandbox.layout.is_up()
    assert listed(cli) == {"drill": "starting"}
    assert "sandbox" not in cli("clusters").out
    error = cli("plan", "gpt2_zero1", "--cluster", "sandbox-drill").error
    assert (
        error == "cluster 'sandbox-drill' is not running: start it with "
        "`trnslurm sandbox up --name drill`"
    )


def test_looking_does_not_lock_out_the_holder(prepare) -> None:
    sandbox = prepare()
    sandbox.crash()
    looking = os.open(sandbox.layout.path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    assert not sandbox.layout.is_held()  # two who look are not taken for a holder
    os.close(looking)


def test_pid_that_is_another_process_now(cli, prepare) -> None:
    sandbox = prepare()
    sandbox.layout.entry.write_text(f"{os.getpid()} net:[1]\n")
    assert "is not running" in cli("sandbox", "exec", "true").error
    sandbox.layout.entry.write_text("4194304 net:[1]\n")
    assert "is not running" in cli("sandbox", "exec", "true").error


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"nodes": 3}', '{"other": 1, "set": []}'])
def test_damaged_settings_do_not_hide_the_sandbox(cli, prepare, text: str) -> None:
    """As after a kill in the middle of `up`, or from another version: `down` must stay possible."""
    sandbox = prepare()
    sandbox.crash()
    sandbox.layout.settings.write_text(text)
    assert listed(cli) == {"sandbox": "crashed"}
    assert cli("sandbox", "down").out == "Sandbox sandbox is down\n"
    assert not sandbox.layout.path.parent.exists()


# its profile


def test_profile_in_a_base_that_others_can_write_is_not_read(cli, base: Path, prepare) -> None:
    prepare()
    assert "sandbox" in cli("clusters").out
    base.chmod(0o777)
    assert "sandbox" not in cli("clusters").out


def test_jobs_are_planned_for_the_sandbox(cli, prepare) -> None:
    prepare()
    tiny = ("gpt2_zero1", "--cluster", "sandbox", "--preset", "tiny", "--nodes")
    done = cli("plan", *tiny, "1,2,3", "--json")
    assert (done.code, done.err) == (0, "")
    assert [plan["nodes"] for plan in json.loads(done.out)["plans"]] == [1, 2, 3]
    more = cli("plan", *tiny, "4").error
    assert more.startswith("--nodes 4 is more than slurm.max_nodes (3)")


def test_env_makes_it_the_cluster_of_submit(cli, prepare, monkeypatch) -> None:
    prepare()
    monkeypatch.setenv("TRNSLURM_CLUSTER", "sandbox")
    done = cli("submit", "gpt2_zero1", "--nodes", "2", "--dry-run")
    size = "gpt2_zero1 (tiny) on 2 x sandbox-trn1.32xlarge, 1 worker per node"
    assert done.out.startswith(f"{size}: ")


# sandbox env


def evaluated(shell: str, lines: str, path: str) -> dict[str, str]:
    """The environment of a real shell after it has evaluated the lines, PATH first set to this."""
    environ = {"PATH": path, "LINES_": lines}
    script = 'eval "$LINES_"; eval "$LINES_"; exec /usr/bin/env -0'
    done = run_process([f"/bin/{shell}", "-ec", script], env=environ)
    assert done.err == ""
    return dict(pair.split("=", 1) for pair in done.ok.split("\0")[:-1])


ODD = """/o'd d/"q"/$HOME/`x`/\\b;&|"""


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("name", ["sandbox", "drill"])
def test_env_and_its_undoing_in_a_real_shell(cli, prepare, monkeypatch, shell, name) -> None:
    layout = prepare(name).layout
    option = ("--name", name)
    before = f"{os.environ['PATH']}:{ODD}::/last"
    monkeypatch.setenv("PATH", before)
    after = evaluated(shell, cli("sandbox", "env", *option).out, before)
    assert after["PATH"] == f"{layout.bin}:{before}"
    assert after["TRNSLURM_SANDBOX"] == name
    assert after["TRNSLURM_CLUSTER"] == layout.cluster

    for key in ("PATH", "TRNSLURM_SANDBOX", "TRNSLURM_CLUSTER"):
        monkeypatch.setenv(key, after[key])
    again = evaluated(shell, cli("sandbox", "env").out, after["PATH"])  # the name is known now
    assert again == after | {"LINES_": again["LINES_"]}

    undone = evaluated(shell, cli("sandbox", "env", "--unset").out, after["PATH"])
    assert undone["PATH"] == before
    assert not [key for key in undone if key.startswith("TRNSLURM")]


def test_unset_needs_no_sandbox(cli, prepare) -> None:
    """After `down`, or after a crash, the shell can still be cleaned."""
    prepare().crash()
    assert cli("sandbox", "env", "--unset").code == 0
    assert cli("sandbox", "down").code == 0
    out = cli("sandbox", "env", "--unset").out
    assert out.splitlines()[0] == f"export PATH={shlex.quote(os.environ['PATH'])}"


def another_users(base: Path) -> Path:
    if os.getuid():
        return Path("/usr")
    base.mkdir(mode=0o700)
    os.chown(base, 65534, 65534)
    return base


def link_to(base: Path, mode: int | None) -> None:
    if mode:
        (base.parent / "elsewhere").mkdir(mode=mode)
    base.symlink_to(base.parent / "elsewhere")


MAKERS = {
    "world-writable": lambda base: (base.mkdir(), base.chmod(0o777)),
    "group-writable": lambda base: (base.mkdir(), base.chmod(0o770)),
    "symlink": lambda base: link_to(base, 0o700),
    "dangling": lambda base: link_to(base, None),
    "file": lambda base: base.touch(),
    "another's": another_users,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_base_that_is_not_ours_alone(cli, base: Path, monkeypatch, make) -> None:
    made = make(base)
    path = made if isinstance(made, Path) else base
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(path))
    before = sorted(base.parent.rglob("*"))
    for command in ("up", "down"):
        done = cli("sandbox", command)
        assert (done.code, done.error.startswith(str(path))) == (1, True)
    assert cli("sandbox", "list").out == ""  # what lies there is not trusted either
    assert cli("clusters").code == 0
    assert sorted(base.parent.rglob("*")) == before


def test_base_whose_parent_is_missing(cli, base: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(base / "b"))
    assert cli("sandbox", "up").error == f"{base}/b: No such file or directory"


@pytest.mark.parametrize("odd", ["a b", "a,b", "a#b", "a=b", "a'b", "ä", "a\nb", "a%nb", "a\\b"])
def test_base_that_slurm_conf_could_not_name(cli, base: Path, monkeypatch, odd: str) -> None:
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(base.parent / odd))
    assert (
        "slurm.conf does not accept this path: set TRNSLURM_SANDBOXES" in cli("sandbox", "up").error
    )


def test_base_that_is_relative_or_too_long_for_a_socket(cli, base: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRNSLURM_SANDBOXES", "here")
    assert "set TRNSLURM_SANDBOXES" in cli("sandbox", "up").error
    assert not Path("here").exists()
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(base / ("x" * 90)))
    assert "too long for a socket: set TRNSLURM_SANDBOXES" in cli("sandbox", "up").error


def test_default_base_is_the_users_own_and_local(monkeypatch) -> None:
    monkeypatch.delenv("TRNSLURM_SANDBOXES")
    assert base_dir() == Path(f"/tmp/trnslurm-{os.getuid()}")
    monkeypatch.setenv("TRNSLURM_SANDBOXES", "")
    assert base_dir() == Path(f"/tmp/trnslurm-{os.getuid()}")
