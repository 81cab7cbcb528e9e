"""What a machine lacks for a sandbox: one line says what to do."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from trnslurm.sandbox import machine
from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.machine import SandboxHost, find_command

APT = "sudo apt-get install --no-install-recommends"
NEEDED = ("unshare", "nsenter", "setpriv", "mount", "ip", "munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults")


def program(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Path]:
    """A base directory, which must not exist after a refusal."""
    base = tmp_path / "base"
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(base))
    yield base
    assert not base.exists()


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
    (bin_dir / name).unlink()
    error = up().error
    assert error.startswith(f"{name} not found: {APT} ")
    assert len(error.partition(APT)[2].split()) == 1


def test_a_file_that_is_no_program_is_missing(up, bin_dir: Path) -> None:
    (bin_dir / "munged").chmod(0o644)
    assert up().error == f"munged not found: {APT} munge"


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
    [("slurmd", "there is no slurmd in its bin or sbin"), ("", "does not say which version")],
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
    said = f"this machine does not let you make namespaces ({words}): run as root"
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
    words = f"user id {os.getuid()} has no name on this machine, and Slurm needs one: add it to"
    assert up().error == f"{words} /etc/passwd"


def test_wrappers_of_a_sandbox_are_no_slurm(bin_dir: Path, tmp_path: Path, monkeypatch) -> None:
    """After `eval "$(trnslurm sandbox env)"`, another `up` must find the real commands."""
    layout = Layout(tmp_path / "base2" / "sandbox")
    for name in CLIENTS:
        program(layout.bin / name)
    layout.settings.write_text("{}")
    monkeypatch.setenv("PATH", f"{layout.bin}:{bin_dir}")
    assert find_command("srun") == str(bin_dir / "srun")


def test_host_survives_its_file(bin_dir: Path) -> None:
    host = SandboxHost.look(accounting=False)
    assert SandboxHost.from_json(host.to_json()) == host
    assert host.client_dir == bin_dir
    assert host.clients == ["sbatch", "srun"]
