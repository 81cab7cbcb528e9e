"""A job's nodes, its master's address and its spares, with stand-ins of scontrol and srun."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from trnslurm.node import address, spares

# It fails as often as there are lines in `busy`.
SCONTROL = """#!/bin/bash
echo "$*" >> {here}/asked
if [ -s {here}/busy ]; then
  sed -i 1d {here}/busy
  echo "slurm_load_node error: Socket timed out" >&2
  exit 7
fi
case $2 in
  hostnames) printf 'node-1\\nnode-2\\nnode-10\\n' ;;
  node) echo "NodeName=$4 CPUTot=128 NodeAddr=$(< {here}/address) NodeHostName=NodeAddr Port=0" ;;
esac
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def command(name: str, text: str) -> None:
        (tmp_path / name).write_text(text.replace("{here}", str(tmp_path)))
        (tmp_path / name).chmod(0o755)

    command("scontrol", SCONTROL)
    command("srun", '#!/bin/bash\nprintf "%s\\n" "$@" > {here}/words\n')
    (tmp_path / "address").write_text("10.1.2.3")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_the_names_are_in_one_word(commands: Path, capsys) -> None:
    assert address.main(["hosts", "node-[1-2,10]"]) == 0
    assert capsys.readouterr().out == "node-1,node-2,node-10\n"
    assert (commands / "asked").read_text() == "show hostnames node-[1-2,10]\n"


@pytest.mark.parametrize(
    ("known", "nodes", "found"),
    [
        ("10.1.2.3", 2, "10.1.2.3"),
        ("node-1.internal", 2, "10.9.8.7"),  # a name: what it means here
        ("127.0.0.1", 1, "127.0.0.1"),  # nobody else has to reach it
        ("127.0.1.1", 2, None),
        ("lo.internal", 2, None),
        ("no.such.host", 2, None),
        ("no.such.host", 1, None),
        ("fe80::1", 2, None),
        ("", 2, None),
    ],
)
def test_the_address_is_the_controllers(
    commands: Path, capsys, monkeypatch, known: str, nodes: int, found: str | None
) -> None:
    def getaddrinfo(name: str, _port: None, family: int) -> list:
        assert family == socket.AF_INET
        names = {"node-1.internal": "10.9.8.7", "lo.internal": "127.0.0.1"}
        if name not in names:
            raise socket.gaierror("Name or service not known")
        return [(family, 1, 6, "", (names[name], 0)), (family, 1, 6, "", ("10.0.0.99", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    (commands / "address").write_text(known)
    code = address.main(["of", "node-1", f"--nodes={nodes}"])
    out, err = capsys.readouterr()
    assert (code, out) == ((0, f"{found}\n") if found else (1, ""))
    seen = {"127.0.1.1": "127.0.1.1", "lo.internal": "127.0.0.1"}.get(known, "")
    words = f"no usable address for node-1 (found '{seen}'): set its NodeAddr in slurm.conf"
    assert err == ("" if found else f"error: {words}\n")


def test_a_busy_controller_is_asked_three_times(commands: Path, capsys, monkeypatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(address.time, "sleep", pauses.append)
    (commands / "busy").write_text("1\n2\n")
    assert address.main(["of", "node-1"]) == 0
    assert (capsys.readouterr().out, pauses) == ("10.1.2.3\n", [10, 30])
    (commands / "busy").write_text("1\n2\n3\n")
    with pytest.raises(SystemExit) as ended:
        address.main(["hosts", "node-1"])
    assert (ended.value.code, pauses) == (7, [10, 30, 10, 30])


def test_no_scontrol(commands: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit) as ended:
        address.main(["hosts", "node-1"])
    assert (ended.value.code, capsys.readouterr().err) == (
        127,
        "scontrol: No such file or directory\n",
    )


@pytest.mark.parametrize("name", ["node-1,node-2,node-3", "node-2", "node-4,node-1"])
def test_spares_are_the_other_nodes(name: str) -> None:
    whole = "node-1,node-2,node-3,node-4"
    found = spares.spare_nodes({"TRNSLURM_ALLOCATION": whole, "TRNSLURM_HOSTS": name})
    assert ",".join(sorted([*found, *name.split(",")])) == whole


def test_a_command_on_the_spares(commands: Path, bench) -> None:
    bench.environ |= {"TRNSLURM_ALLOCATION": "node-1,node-11,node-2", "TRNSLURM_HOSTS": "node-1"}
    words = ["--container-image=it's", "true", "a b"]
    done = bench.run("spares", *words)
    assert (done.returncode, done.stderr) == (0, "")
    own = ["--nodes=2", "--nodelist=node-11,node-2", "--ntasks-per-node=1", "--cpu-bind=none"]
    assert (commands / "words").read_text().splitlines() == [*own, "--overlap", *words]
    (commands / "words").unlink()
    bench.environ["TRNSLURM_HOSTS"] = "node-1,node-2,node-11"
    assert bench.run("spares", "true").returncode == 0
    assert not (commands / "words").exists()
    assert bench.run("spares").returncode == 2
