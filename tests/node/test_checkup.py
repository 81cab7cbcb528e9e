"""A node's part of `doctor --run`: real connections, and stand-ins of what only AWS has."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trnslurm.node.checkup import facts, graph, links, program
from trnslurm.node.checkup.links import Host, LinkError, take_part
from trnslurm.sandbox import neuron_stand_ins

from ..free_port import free_port


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The stand-ins on PATH, as of a trn1.32xlarge; returns what chooses a behaviour."""
    home, path = tmp_path / "tools", tmp_path / "bin"
    (home / "all").mkdir(parents=True)
    path.mkdir()
    size = {"devices": 16, "cores_per_device": 2, "device_gib": 32, "efa": 8}
    (home / "instance.json").write_text(json.dumps({"instance_type": "trn1.32xlarge"} | size))
    for name in ("fi_info", "neuron_parallel_compile"):
        tool = path / name
        command = f"'{sys.executable}' -I '{neuron_stand_ins.__file__}' --home '{home}' {name}"
        tool.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    return lambda tool, behaviour: (home / "all" / tool).write_text(behaviour)


def test_efa_as_fi_info_shows_it(tools, monkeypatch) -> None:
    assert len(facts.efa()["domains"]) == 8
    assert facts.versions()["libfabric"] == "2.1.0amzn3.0"
    tools("fi_info", "missing-interface")
    assert len(facts.efa()["domains"]) == 7
    tools("fi_info", "no-provider")
    assert facts.efa() == {"domains": [], "said": "fi_getinfo: -61 (No data available)"}
    monkeypatch.setenv("PATH", "/nowhere")
    assert facts.efa() == {"domains": [], "said": "fi_info is not on PATH"}


def test_versions_of_packages_and_drivers(tmp_path, monkeypatch) -> None:
    installed = tmp_path / "efa_installed_packages"
    installed.write_text("# EFA installer version: 1.43.2\nefa-config-1.18\n")
    nvidia = tmp_path / "nvidia"
    nvidia.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.172.08  Release Build\n"
    )
    dpkg = tmp_path / "dpkg-query"
    dpkg.write_text("#!/bin/sh\nprintf 'aws-neuronx-dkms 2.24.7\\naws-neuronx-gone \\n'\n")
    dpkg.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(
        facts, "_FILES",
        {"EFA installer": (installed, facts._FILES["EFA installer"][1]),
         "nvidia driver": (nvidia, facts._FILES["nvidia driver"][1])},
    )  # fmt: skip
    found = facts.versions()
    assert found.pop("kernel")
    found.pop("libfabric", None)
    assert found == {
        "EFA installer": "1.43.2", "nvidia driver": "570.172.08", "aws-neuronx-dkms": "2.24.7"
    }  # fmt: skip


def meet(num: int, order: dict[str, Any], obeyed: list[Any]) -> Host:
    """Have node 0 and the others meet on this machine."""
    port = free_port()
    host = Host(port, num)

    def guest(node: int) -> None:
        take_part("127.0.0.1", port, node, obeyed.append, reach_s=30, order_s=30)

    guests = [threading.Thread(target=guest, args=(n,)) for n in range(1, num)]
    for thread in guests:
        thread.start()
    try:
        host.meet(30)
        host.ask_all(order, 30)
    finally:
        host.close()
        for thread in guests:
            thread.join(30)
    with socket.create_server(("", port)):  # free at once: torchrun takes it next
        return host


def test_links_are_timed_both_ways_and_orders_are_obeyed(monkeypatch) -> None:
    monkeypatch.setattr(links, "MOST_BYTES", 4 << 20)
    obeyed: list[Any] = []
    host = meet(3, {"graph": None}, obeyed)
    assert obeyed == [{"graph": None}] * 2
    assert host.rates.keys() == {"1", "2"}
    assert all(rate > 0 for rates in host.rates.values() for rate in rates.values())


def test_a_stream_ends_in_time_on_a_slow_link(monkeypatch) -> None:
    clock = iter([0.0, 0.4, 0.8, 1.2])
    monkeypatch.setattr(links, "_CHUNK", bytes(100))
    ours, theirs = socket.socketpair()
    near, far = links.Link(ours), links.Link(theirs)
    with monkeypatch.context() as slow:
        slow.setattr(links, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        near.stream()
    times = iter([10.0, 10.5])
    with monkeypatch.context() as slow:
        slow.setattr(links, "time", SimpleNamespace(monotonic=lambda: next(times)))
        assert far.time_stream() == 200 / 1e6 / 0.5
    near.close()
    far.close()


def test_nobody_there(monkeypatch) -> None:
    port = free_port()
    with pytest.raises(LinkError, match=r"cannot reach node 0 at 127.0.0.1:\d+ \(Connection refu"):
        take_part("127.0.0.1", port, 1, lambda order: None, reach_s=0.1, order_s=1)
    host = Host(port, 2)
    host.meet(0.05)
    host.ask_all({}, 1)
    host.close()
    assert host.rates == {}


def test_a_graph_is_found_again_or_the_reason_why_not(tools, tmp_path, monkeypatch, capfd) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(cache))
    command = ["neuron_parallel_compile", "true", "--graph", "7"]
    made = graph.compile_new(command)
    (file,) = made["files"]
    assert made["problem"] is None and Path(file["path"]).is_relative_to(cache)
    assert graph.find_again(command, made) == {"problem": None}

    # Another key here, as with other compiler flags or versions: it is compiled again.
    other = graph.find_again([*command[:-1], "8"], made)
    assert other == {"problem": "it compiled 1 graphs again instead of finding them"}
    Path(file["path"]).write_text("other")
    assert "other content here" in graph.find_again(command, made)["problem"]
    shutil.rmtree(cache)
    assert graph.find_again(command, made)["problem"].endswith("No such file or directory")

    tools("neuron_parallel_compile", "failed-graphs")
    assert "could not be compiled" in graph.compile_new(command)["problem"]
    command = ["env", "neuron_parallel_compile_not"]
    assert graph.compile_new(command)["problem"] == "neuron_parallel_compile is not on PATH"
    capfd.readouterr()


def test_where_a_cache_is_shared(monkeypatch) -> None:
    monkeypatch.delenv("NEURON_COMPILE_CACHE_URL", raising=False)
    assert "compile_cache is not set" in graph.shared_cache("shared")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "/fsx/cache")
    assert graph.shared_cache("shared") == ""
    assert graph.shared_cache("per-host") == "compile_layout: per-host"
    assert any(word.startswith("NEURON_COMPILE_CACHE_URL=/fsx/cache/hosts/")
               for word in graph.command_of(1, "per-host"))  # fmt: skip


def test_workers_that_hang_are_ended(tmp_path) -> None:
    late = program.run_workers(["sleep", "600"], 0.2)
    assert late == {"exit_code": -15, "late": True}
    assert program.run_workers(["sh", "-c", "exit 3"], 60) == {"exit_code": 3, "late": False}


def test_what_fails_is_written_down_and_the_rest_is_measured(tmp_path, monkeypatch) -> None:
    (tmp_path / "state").mkdir()
    node = program.Node(tmp_path, 1)

    def fail() -> None:
        raise ValueError("no such thing")

    node.note("limits", fail)
    node.note("versions", lambda: {"kernel": "6"})
    seen = json.loads((tmp_path / "state/checkup-node1.json").read_text())
    assert seen["limits"] == {"problem": "ValueError: no such thing"}
    assert seen["versions"] == {"kernel": "6"}


def test_the_limit_of_open_files_is_raised_as_in_a_job() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))\n"
        "from trnslurm.node.checkup import facts; facts.raise_open_files(2)\n"
        "print(facts.limits()['files'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "128\n"
