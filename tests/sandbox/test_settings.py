"""Settings that a sandbox refuses, and faults that do not exist: one line each, nothing left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trnslurm.errors import SandboxError
from trnslurm.sandbox.machine import SandboxHost
from trnslurm.sandbox.settings import NODE_KEYS, OWNED_KEYS, SandboxSettings

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
    words = "use up to 20 lower-case letters, digits and '-'"
    assert (done.code, done.error) == (1, f"sandbox name {name!r}: {words}")


def test_bad_name_in_the_environment(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRNSLURM_SANDBOX", "Bad")
    assert cli("sandbox", "status").error.startswith("sandbox name 'Bad': ")


@pytest.mark.parametrize("nodes", [-1, 0, 129, 10**9])
def test_bad_number_of_nodes(cli, nodes: int) -> None:
    done = cli(*UP, f"--nodes={nodes}")
    assert (done.code, done.error) == (1, f"--nodes {nodes}: a sandbox has 1 to 128 nodes")


@pytest.mark.parametrize("users", [-1, 9])
def test_bad_number_of_users(cli, users: int) -> None:
    done = cli(*UP, f"--users={users}")
    assert (done.code, done.error) == (1, f"--users {users}: a sandbox has 0 to 8 further users")


def test_user_that_it_does_not_have() -> None:
    assert SandboxSettings(users=2).check_user("bob") == "bob"
    for settings, words in (
        (SandboxSettings(users=2), "it has alice, bob"),
        (SandboxSettings(), "up --users 2"),
    ):
        with pytest.raises(SandboxError, match=rf"^no user 'carol' in this sandbox: .*{words}"):
            settings.check_user("carol")


def test_number_of_nodes_that_is_none(cli) -> None:
    done = cli(*UP, "--nodes", "four")
    assert (done.code, "'four'" in done.error) == (2, True)


def test_unknown_type_is_answered_with_the_nearest(cli) -> None:
    done = cli(*UP, "--like", "trn1.32xlarg")
    assert done.code == 1
    assert "unknown instance type 'trn1.32xlarg' (did you mean \"trn1.32xlarge\"?)" in done.error


def test_this_machine_is_no_type_of_a_cluster(cli) -> None:
    assert cli(*UP, "--like", "local").error == "--like local: not an instance type of a cluster"


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
    assert (done.code, "expected Key=Value, a line of slurm.conf" in done.error) == (1, True)
    assert done.error.isprintable()


@pytest.mark.parametrize("setting", ["KillWait=", "KillWait=  "])
def test_setting_without_a_value(cli, setting: str) -> None:
    assert cli(*UP, "--set", setting).error.endswith("KillWait needs a value")


@pytest.mark.parametrize("change", [str, str.lower, str.upper])
@pytest.mark.parametrize("key", OWNED_KEYS)
def test_key_that_holds_the_sandbox_together(cli, key: str, change: Callable[[str], str]) -> None:
    asked = f"{change(key)}=x"
    words = f"--set {asked}: {change(key)} holds the sandbox together and cannot be set"
    assert cli(*UP, "--set", asked).error == words


@pytest.mark.parametrize("key", NODE_KEYS)
def test_word_of_a_node_line_has_no_blank(cli, key: str) -> None:
    asked = f"{key.lower()}=8 State=DOWN"
    assert cli(*UP, "--set", asked).error == f"--set {asked}: {key} takes one word"


def test_features_is_another_name_of_feature(cli) -> None:
    """Slurm knows both names, so neither may carry a blank into the node lines."""
    assert "takes one word" in cli(*UP, "--set", "Features=a State=DOWN").error


@pytest.mark.parametrize("asked", ["CPUs=abc", "CPUs=0", "cpus=-1", "Sockets=2x", "RealMemory=1G"])
def test_count_that_is_no_number(cli, asked: str) -> None:
    """Otherwise slurmd, or the holder, would end with a message that does not name --set."""
    assert cli(*UP, "--set", asked).error.startswith(f"--set {asked}: ")


@pytest.mark.parametrize(
    "gres", ["gpu", "gpu:0", "gpu:a100", "gpu:8,", ",gpu:8", "gpu:8G", "a:b:c:1"]
)
def test_claim_of_gres_that_counts_nothing(cli, gres: str) -> None:
    error = cli(*UP, "--set", f"Gres={gres}").error
    assert error == f"--set Gres={gres}: Gres takes name:count or name:type:count"


def test_stand_ins_of_neuron_tools_need_neuron_devices(cli) -> None:
    done = cli(*UP, "--like", "p4d.24xlarge", "--neuron-stand-ins")
    assert done.error == "--neuron-stand-ins: p4d.24xlarge has no Neuron devices"


@pytest.mark.parametrize("kind", ["missing", "directory", "no program", "empty"])
def test_interpreter_that_is_none(cli, tmp_path: Path, kind: str) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    given = {"missing": tmp_path / "no", "directory": tmp_path, "no program": plain, "empty": ""}
    done = cli("sandbox", "up", "--python", given[kind])
    assert (done.code, done.error) == (1, f"--python {given[kind]}: no such program")


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


def test_settings_survive_their_file() -> None:
    settings = SandboxSettings(
        nodes=2, like="p4d.24xlarge", accounting=True, set=("KillWait=5", "CPUs=8")
    )
    assert SandboxSettings.from_json(settings.to_json()) == settings


def test_node_by_number_or_name() -> None:
    settings = SandboxSettings(nodes=12)
    assert settings.node_number("12") == 12
    assert settings.node_number("compute-dy-trn1-12") == 12
    for wrong in ("0", "13", "-1", "", "compute-dy-trn1-13", "compute-dy-trn1", "²", "1.0"):
        with pytest.raises(SandboxError, match=r"use 1 to 12, or a name as in compute-dy-trn1-1$"):
            settings.node_number(wrong)


NODE_USAGE = "expected NODE slurmd-kill|slurmd-start|freeze|thaw|link-down|link-up|reboot|"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("1", NODE_USAGE),
        ("1 freeze now", NODE_USAGE),
        ("freeze", NODE_USAGE),
        ("1 freze", 'fault 1 freze: no such fault (did you mean "freeze"?)'),
        ("1 burn", "fault 1 burn: no such fault: slurmd-kill, "),
        ("ctld", "fault ctld: expected ctld kill|start"),
        ("ctld stop", "fault ctld stop: expected kill or start"),
        ("dbd kill now", "expected dbd kill|start"),
        ("proc 1 train", "expected proc NODE PATTERN SIGNAL"),
        ("disk /tmp", "expected disk DIRECTORY SIZE|off"),
        ("neuron all neuron-ls", "expected neuron NODE|all TOOL BEHAVIOUR"),
        ("disk /tmp 0M", "fault disk: size '0M': use 8M, 1G or the like, or off"),
        ("disk /tmp 8K", "fault disk: size '8K': use 8M, 1G or the like, or off"),
        ("disk /tmp -8M", "fault disk: size '-8M': use 8M, 1G or the like, or off"),
        ("disk /no-such-directory 8M", "fault disk: /no-such-directory must be an empty directory"),
        ("disk / 8M", "fault disk: / must be an empty directory of yours"),
        ("1 freeze", "sandbox sandbox is not up: `trnslurm sandbox up` starts it"),
        ("ctld kill", "sandbox sandbox is not up: `trnslurm sandbox up` starts it"),
        ("proc 1 [ TERM", "sandbox sandbox is not up: `trnslurm sandbox up` starts it"),
        ("neuron all neuron-ls exit", "is not up: `trnslurm sandbox up` starts it"),
    ],
)
def test_fault_that_cannot_be(cli, words: str, said: str) -> None:
    done = cli("sandbox", "fault", "--", *words.split())
    assert (done.code, said in done.error) == (1, True), done


def test_fault_without_a_word(cli) -> None:
    done = cli("sandbox", "fault")
    assert (done.code, "'FAULT...'" in done.error) == (2, True)


@pytest.mark.parametrize("command", ["status", "env", "exec true", "exec --node 1 true"])
def test_sandbox_that_is_not_up(cli, command: str) -> None:
    done = cli("sandbox", *command.split(), *(["--name=x"] if "exec" not in command else []))
    assert (done.code, "is not up: `trnslurm sandbox up" in done.error) == (1, True)


def test_down_and_list_where_there_is_none(cli) -> None:
    assert cli("sandbox", "down").out == "No sandbox sandbox\n"
    assert cli("sandbox", "down", "--all").code == 0
    done = cli("sandbox", "list")
    assert (done.code, done.out) == (0, "")
    assert done.err == "No sandbox; start one with: trnslurm sandbox up\n"
    assert cli("sandbox", "list", "--json").out == "[]\n"
