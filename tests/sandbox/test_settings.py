"""Settings that a sandbox refuses, and faults that do not exist: one line each, nothing left."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trnslurm.errors import SandboxError
from trnslurm.sandbox import machine
from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.machine import SandboxHost, find_command
from trnslurm.sandbox.settings import NODE_KEYS, OWNED_KEYS, SandboxSettings, settings_of

UP = ("sandbox", "up", "--python", sys.executable)


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Path]:
    """A base directory, which must not exist after a refusal."""
    base = tmp_path / "base"
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(base))
    yield base
    assert not base.exists()


@pytest.mark.parametrize("name", ["Bad", "-x", "a_b", "a.b", "../x", "a/b", "", " ", "x" * 21, "ä"])
@pytest.mark.parametrize("command", ["up", "down", "status", "env"])
def test_bad_name(cli, command: str, name: str) -> None:
    done = cli("sandbox", command, f"--name={name}")
    words = "use up to 20 lowercase letters, digits and '-'"
    assert (done.code, done.error) == (1, f"sandbox name {name!r}: {words}")


def test_bad_name_in_the_environment(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRNSLURM_SANDBOX", "Bad")
    assert cli("sandbox", "status").error.startswith("sandbox name 'Bad': ")


# Otherwise slurmd, or the holder, would end with a message that does not name --set.
COUNTS = ("CPUs=abc", "CPUs=0", "cpus=-1", "Sockets=2x", "RealMemory=1G")
GRES = ("gpu", "gpu:0", "gpu:a100", "gpu:8,", ",gpu:8", "gpu:8G", "a:b:c:1")
REFUSED = {
    **{f"--nodes={n}": f"--nodes {n}: a sandbox can have 1 to 256 nodes" for n in (-1, 0, 257)},
    **{f"--users={n}": f"--users {n}: a sandbox can have up to 8 additional" for n in (-1, 9)},
    "--like=trn1.32xlarg": "'trn1.32xlarg' (did you mean \"trn1.32xlarge\"?)",
    "--like=local": "unknown instance type 'local'; known: trn1.2xlarge, ",
    "--like=p4d.24xlarge --neuron-stand-ins": "p4d.24xlarge has no Neuron devices",
    "--set KillWait=": "KillWait needs a value",
    **{f"--set {asked}": f"--set {asked}: " for asked in COUNTS},
    **{f"--set Gres={gres}": "Gres must be name:count or name:type:count" for gres in GRES},
}


@pytest.mark.parametrize("words", REFUSED)
def test_option_that_is_refused(cli, words: str) -> None:
    done = cli(*UP, *words.split(" "))
    assert (done.code, REFUSED[words] in done.error) == (1, True), done


@pytest.mark.parametrize("key", [*NODE_KEYS, "Features"])
def test_word_of_a_node_line_has_no_blank(cli, key: str) -> None:
    """Slurm knows two names of Feature, so neither may carry a blank into the node lines."""
    assert "must be a single word" in cli(*UP, "--set", f"{key.lower()}=8 State=DOWN").error


def test_user_that_it_does_not_have() -> None:
    assert SandboxSettings(users=2).check_user("bob") == "bob"
    for settings, words in (
        (SandboxSettings(users=2), "its users are alice, bob"),
        (SandboxSettings(), "up --users 2"),
    ):
        said = rf"^there is no user 'carol' in this sandbox: .*{words}"
        with pytest.raises(SandboxError, match=said):
            settings.check_user("carol")


@pytest.mark.parametrize(
    "setting",
    [
        "KillWait", "=5", "", "Kill Wait=5", " KillWait=5", "5x=1", "Kill-Wait=5", "#KillWait=5",
        "KillWait=5\nFoo=1", "KillWait=5\r", "KillWait=5\x1b[31m", "KillWait=5\x07", "KillWait=\t5",
        "KillWait=5\x85", "KillWait=5\u202e", "KillWait=fünf",
    ],
)  # fmt: skip
def test_setting_that_is_no_line_of_slurm_conf(cli, setting: str) -> None:
    done = cli(*UP, "--set", setting)
    assert (done.code, "expected Key=Value, a line for slurm.conf" in done.error) == (1, True)
    assert done.error.isprintable()


@pytest.mark.parametrize("change", [str, str.lower, str.upper])
@pytest.mark.parametrize("key", OWNED_KEYS)
def test_key_that_holds_the_sandbox_together(cli, key: str, change: Callable[[str], str]) -> None:
    asked = f"{change(key)}=x"
    words = f"--set {asked}: the sandbox depends on {change(key)}, so it cannot be set"
    assert cli(*UP, "--set", asked).error == words


@pytest.mark.parametrize("kind", ["missing", "directory", "no program", "empty"])
def test_interpreter_that_is_none(cli, tmp_path: Path, kind: str) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    given = {"missing": tmp_path / "no", "directory": tmp_path, "no program": plain, "empty": ""}
    done = cli("sandbox", "up", "--python", given[kind])
    assert (done.code, done.error) == (1, f"--python {given[kind]}: program not found")


@pytest.fixture
def some_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has everything, so that `up` gets as far as starting the holder."""
    host = SandboxHost(
        user="me", uid=1, gid=1, unshare=(), commands={"srun": "/bin/srun"}, version=(22, 5, 8),
        python="/bin/false",
    )  # fmt: skip
    monkeypatch.setattr(SandboxHost, "look", lambda accounting, slurm: host)
    monkeypatch.setattr(SandboxHost, "clients", ["srun"])


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("text", ["it has ended", "0", "-1", "1000000000000000"])
def test_owner_that_is_no_process(cli, some_machine, text: str) -> None:
    pid = str(dead_pid()) if text == "it has ended" else text
    done = cli(*UP, f"--owner={pid}")
    assert (done.code, done.error.startswith(f"--owner {pid}: ")) == (1, True)


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = SandboxSettings(
        nodes=2, like="p4d.24xlarge", accounting=True, set=("KillWait=5", "CPUs=8")
    )
    layout = Layout(tmp_path)
    layout.settings.write_text(settings.to_json())
    assert settings_of(layout) == settings


def test_node_by_number_or_name() -> None:
    settings = SandboxSettings(nodes=12)
    assert settings.node_number("12") == 12
    assert settings.node_number("compute-dy-trn1-12") == 12
    for wrong in ("0", "13", "-1", "", "compute-dy-trn1-13", "compute-dy-trn1", "²", "1.0"):
        with pytest.raises(
            SandboxError, match=r"use 1 to 12, or a name such as compute-dy-trn1-1$"
        ):
            settings.node_number(wrong)


NODE_USAGE = "expected NODE slurmd-kill|slurmd-start|freeze|thaw|link-down|link-up|reboot|"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("1", NODE_USAGE),
        ("1 freeze now", NODE_USAGE),
        ("freeze", NODE_USAGE),
        ("1 freze", 'fault 1 freze: there is no such fault (did you mean "freeze"?)'),
        ("1 burn", "fault 1 burn: there is no such fault: slurmd-kill, "),
        ("ctld", "fault ctld: expected ctld kill|start"),
        ("ctld stop", "fault ctld stop: expected kill or start"),
        ("dbd kill now", "expected dbd kill|start"),
        ("proc 1 train", "expected proc NODE PATTERN SIGNAL"),
        ("disk /tmp", "expected disk DIRECTORY SIZE|off"),
        ("neuron all neuron-ls", "expected neuron NODE|all TOOL BEHAVIOR"),
        ("disk /tmp 0M", "fault disk: size '0M': use a size such as 8M or 1G, or off"),
        ("disk /tmp 8K", "fault disk: size '8K': use a size such as 8M or 1G, or off"),
        ("disk /tmp -8M", "fault disk: size '-8M': use a size such as 8M or 1G, or off"),
        ("disk /no-such-directory 8M", "fault disk: /no-such-directory must be an empty directory"),
        ("disk / 8M", "fault disk: / must be an empty directory that you own"),
        ("1 freeze", "sandbox sandbox is not running: start it with `trnslurm"),
        ("ctld kill", "sandbox sandbox is not running: start it with `trnslurm"),
        ("proc 1 [ TERM", "sandbox sandbox is not running: start it with `trnslurm"),
        ("neuron all neuron-ls exit", "is not running: start it with `trnslurm"),
    ],
)
def test_fault_that_cannot_be(cli, words: str, said: str) -> None:
    done = cli("sandbox", "fault", "--", *words.split())
    assert (done.code, said in done.error) == (1, True), done


@pytest.mark.parametrize("command", ["status", "env", "exec true", "exec --node 1 true"])
def test_sandbox_that_is_not_up(cli, command: str) -> None:
    done = cli("sandbox", *command.split(), *(["--name=x"] if "exec" not in command else []))
    assert (done.code, "is not running: start it with `trnslurm sandbox up" in done.error) == (
        1,
        True,
    )


def test_down_and_list_where_there_is_none(cli) -> None:
    assert cli("sandbox", "down").out == "No sandbox sandbox\n"
    assert cli("sandbox", "down", "--all").code == 0
    done = cli("sandbox", "list")
    assert (done.code, done.out) == (0, "")
    assert done.err == "No sandboxes. To start one: trnslurm sandbox up\n"
    assert cli("sandbox", "list", "--json").out == "[]\n"


APT = "run sudo apt-get install --no-install-recommends"
NEEDED = ("unshare", "nsenter", "setpriv", "mount", "ip", "munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults")


def program(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory with commands; those that a sandbox runs do nothing there."""
    directory = tmp_path / "bin"
    for name in (*NEEDED, *CLIENTS):
        program(directory / name, "echo slurm-wlm 22.05.8")
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(machine, "_PLACES", ())
    return directory


@pytest.fixture
def up(cli, bin_dir: Path):
    def call(*options: str):
        return cli("sandbox", "up", "--python", "/bin/sh", *options)

    return call


def test_nothing_there(up, bin_dir: Path) -> None:
    for file in bin_dir.iterdir():
        file.unlink()
    done = up()
    packages = "util-linux mount iproute2 munge slurmctld slurmd slurm-client"
    assert (done.code, done.error) == (
        1, f"{', '.join((*NEEDED, *CLIENTS))} not found: {APT} {packages}"
    )  # fmt: skip


@pytest.mark.parametrize("name", [*NEEDED, *CLIENTS])
def test_one_missing(up, bin_dir: Path, name: str) -> None:
    (bin_dir / name).chmod(0o644)  # a file that is no program
    assert up().error.startswith(f"{name} not found: {APT} ")
    (bin_dir / name).unlink()
    error = up().error
    assert error.startswith(f"{name} not found: {APT} ")
    assert len(error.partition(APT)[2].split()) == 1


def test_accounting_needs_more(up) -> None:
    words = "slurmdbd mariadb-server-core mariadb-client-core"
    assert up("--accounting").error == f"{', '.join(ACCOUNTING)} not found: {APT} {words}"


def test_all_of_one_prefix(bin_dir: Path, tmp_path: Path) -> None:
    """Commands and daemons of two versions do not understand each other."""
    for name in ("bin/sbatch", "bin/srun", "sbin/slurmctld", "sbin/slurmd"):
        program(tmp_path / "opt" / name, "echo slurm 25.11.0-0rc1")
    host = SandboxHost.look(accounting=False, slurm=str(tmp_path / "opt"))
    assert host.client_dir == tmp_path / "opt/bin"
    assert host.commands["slurmd"] == str(tmp_path / "opt/sbin/slurmd")
    assert (host.version, host.commands["munged"]) == ((25, 11, 0), str(bin_dir / "munged"))


def test_the_daemons_beside_the_srun_on_path_are_taken(
    bin_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    for name in ("bin/sbatch", "bin/srun", "sbin/slurmctld", "sbin/slurmd"):
        program(tmp_path / "opt" / name, "echo slurm 24.05.8")
    monkeypatch.setenv("PATH", f"{tmp_path}/opt/bin:{bin_dir}")
    host = SandboxHost.look(accounting=False)
    assert host.commands["slurmd"] == str(tmp_path / "opt/sbin/slurmd")
    assert host.release == "24.05.8"


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("slurmd", "there is no slurmd in its bin or sbin"),
        ("", "-V does not print a Slurm version"),
    ],
)
def test_a_prefix_that_is_none(up, tmp_path: Path, missing: str, said: str) -> None:
    for name in {"sbatch", "srun", "slurmctld", "slurmd"} - {missing}:
        program(tmp_path / "opt/bin" / name)
    assert said in up("--slurm", str(tmp_path / "opt")).error


def test_no_right_to_make_namespaces(up, bin_dir: Path) -> None:
    words = "unshare: unshare failed: Operation not permitted"
    program(bin_dir / "unshare", f"echo '{words}' >&2; exit 1")
    done = up()
    assert done.code == 1
    said = f"this machine does not let you create namespaces ({words}): run as root"
    assert done.error.startswith(said)


def test_the_user_namespace_is_tried_where_plain_namespaces_fail(bin_dir: Path) -> None:
    """As for an ordinary user, and for root of a container without --privileged."""
    program(bin_dir / "unshare", 'case "$*" in *--user*) exit 0;; esac; exit 1')
    host = SandboxHost.look(accounting=False)
    assert host.user_namespace
    assert "--map-root-user" in host.unshare


def test_root_needs_no_user_namespace(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert not SandboxHost.look(accounting=False).user_namespace


def test_user_id_without_a_name(up, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    words = f"user ID {os.getuid()} has no name on this machine, but Slurm requires one: add it"
    assert up().error == f"{words} to /etc/passwd"


def test_wrappers_of_a_sandbox_are_no_slurm(bin_dir: Path, tmp_path: Path, monkeypatch) -> None:
    """After `eval "$(trnslurm sandbox env)"`, another `up` must find the real commands."""
    layout = Layout(tmp_path / "base2" / "sandbox")
    for name in CLIENTS:
        program(layout.bin / name)
    layout.settings.write_text("{}")
    monkeypatch.setenv("PATH", f"{layout.bin}:{bin_dir}")
    assert find_command("srun") == str(bin_dir / "srun")


def test_host_survives_its_file(bin_dir: Path, tmp_path: Path) -> None:
    host = SandboxHost.look(accounting=False)
    layout = Layout(tmp_path)
    layout.host.write_text(host.to_json())
    assert SandboxHost.of(layout) == host
    assert host.client_dir == bin_dir
    assert host.clients == ["sbatch", "srun"]
