"""A node's part of `doctor --run`: real connections, and stand-ins of what only AWS has."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trnslurm.devices import NEURON
from trnslurm.node import meeting
from trnslurm.node.meeting import Connection, Meeting, MeetingError, Rendezvous
from trnslurm.node.preflight import checkup
from trnslurm.sandbox import neuron_stand_ins

from ..free_port import free_port
from ..processes import run_process


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
    assert len(checkup.efa()["domains"]) == 8
    assert checkup.versions()["libfabric"] == "2.1.0amzn3.0"
    tools("fi_info", "missing-interface")
    assert len(checkup.efa()["domains"]) == 7
    tools("fi_info", "no-provider")
    assert checkup.efa() == {"domains": [], "said": "fi_getinfo: -61 (No data available)"}
    monkeypatch.setenv("PATH", "/nowhere")
    assert checkup.efa() == {"domains": [], "said": "fi_info is not on PATH"}


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
        checkup, "_FILES",
        {"EFA installer": (installed, checkup._FILES["EFA installer"][1]),
         "nvidia driver": (nvidia, checkup._FILES["nvidia driver"][1])},
    )  # fmt: skip
    found = checkup.versions()
    assert found.pop("kernel")
    found.pop("libfabric", None)
    assert found == {
        "EFA installer": "1.43.2", "nvidia driver": "570.172.08", "aws-neuronx-dkms": "2.24.7"
    }  # fmt: skip


def rendezvous(node: int, num: int, port: int) -> Rendezvous:
    hosts = tuple(f"node-{n}" for n in range(num))
    return Rendezvous(
        purpose="checkup", node=node, hosts=hosts, address="127.0.0.1", port=port,
        run=Path("/fsx/runs/one"), phase="train", attempt=1,
    )  # fmt: skip


def test_links_are_timed_both_ways_and_orders_are_obeyed(monkeypatch) -> None:
    monkeypatch.setattr(meeting, "MAX_STREAM_BYTES", 4 << 20)
    made = {"problem": None, "graphs": ["one"]}
    graph = SimpleNamespace(
        why_not_shared=lambda: "", compile=lambda: made, find=lambda o: {"found": o["graphs"]}
    )
    monkeypatch.setattr(checkup, "graph_of", lambda options: graph)
    port, found = free_port(), {}

    def take_part(node: int) -> None:
        options = SimpleNamespace(graph_size=7, cache_layout="shared", device=NEURON)
        found[node] = checkup.meet(rendezvous(node, 3, port), options)

    nodes = [threading.Thread(target=take_part, args=(n,)) for n in range(3)]
    for thread in nodes:
        thread.start()
    for thread in nodes:
        thread.join(600)
    with socket.create_server(("", port)):  # free at once: the workers take it next
        pass
    assert found[1] == found[2] == {"graph": {"found": ["one"]}}
    assert found[0]["graph"] == made | {"alone": ""}
    assert found[0]["rates"].keys() == {"1", "2"}
    assert all(rate > 0 for rates in found[0]["rates"].values() for rate in rates.values())


def test_a_stream_ends_in_time_on_a_slow_link(monkeypatch) -> None:
    clock = iter([0.0, 0.4, 0.8, 1.2])
    monkeypatch.setattr(meeting, "_CHUNK", bytes(100))
    ours, theirs = socket.socketpair()
    near, far = Connection(ours), Connection(theirs)
    with monkeypatch.context() as slow:
        slow.setattr(meeting, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        near.stream()
    times = iter([10.0, 10.5])
    with monkeypatch.context() as slow:
        slow.setattr(meeting, "time", SimpleNamespace(monotonic=lambda: next(times)))
        assert far.time_stream() == 200 / 1e6 / 0.5
    near.close()
    far.close()


def test_no_other_node_comes() -> None:
    port = free_port()
    refused = r"cannot reach node 0 at 127.0.0.1:\d+ \(Connection refu"
    with (
        pytest.raises(MeetingError, match=refused),
        meeting.join(rendezvous(1, 2, port), reach_s=0.1),
    ):
        pass
    node0 = Meeting(rendezvous(0, 2, port), checkup.one_by_one())
    node0.open(time.monotonic())
    node0.wait(time.monotonic() + 0.05)
    node0.answer({})
    assert node0.heard == {}


def test_a_node_of_another_meeting_is_a_stranger() -> None:
    """A preflight and a checkup have the same port, one after the other."""
    port = free_port()
    node0 = Meeting(rendezvous(0, 2, port), checkup.one_by_one())
    node0.open(time.monotonic() + 10)
    other = replace(rendezvous(1, 2, port), purpose="preflight")
    with (
        pytest.raises(MeetingError, match="another job is using that port"),
        meeting.join(other, reach_s=0.1),
    ):
        pass
    node0.answer({})
    assert node0.heard == {}


def test_a_graph_is_found_again_or_the_reason_why_not(tools, tmp_path, monkeypatch, capfd) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(cache))
    graph, other = checkup.XlaGraph(7, "shared"), checkup.XlaGraph(8, "shared")
    for each, size in ((graph, "7"), (other, "8")):
        each.command = ["neuron_parallel_compile", "true", "--graph", size]
    made = graph.compile()
    (file,) = made["files"]
    assert made["problem"] is None and Path(file["path"]).is_relative_to(cache)
    assert graph.find(made) == {"problem": None}

    # Another key here, as with other compiler flags or versions: it is compiled again.
    again = {"problem": "it compiled 1 graphs again instead of finding them"}
    assert other.find(made) == again
    Path(file["path"]).write_text("other")
    assert "different content here" in graph.find(made)["problem"]
    shutil.rmtree(cache)
    assert graph.find(made)["problem"].endswith("No such file or directory")

    tools("neuron_parallel_compile", "failed-graphs")
    assert "could not be compiled" in graph.compile()["problem"]
    graph.command = ["env", "neuron_parallel_compile_not"]
    assert graph.compile()["problem"] == "neuron_parallel_compile is not on PATH"
    capfd.readouterr()


def test_where_a_cache_is_shared(monkeypatch) -> None:
    monkeypatch.delenv("NEURON_COMPILE_CACHE_URL", raising=False)
    assert "compile_cache is not set" in checkup.XlaGraph(1, "shared").why_not_shared()
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "/fsx/cache")
    assert checkup.XlaGraph(1, "shared").why_not_shared() == ""
    graph = checkup.XlaGraph(1, "per-host")
    assert graph.why_not_shared() == "compile_layout: per-host"
    own = "NEURON_COMPILE_CACHE_URL=/fsx/cache/hosts/"
    assert any(word.startswith(own) for word in graph.command)


def test_workers_that_hang_are_ended(tmp_path) -> None:
    late = checkup.run_workers(["sleep", "600"], 0.2)
    assert late == {"exit_code": -15, "late": True}
    assert checkup.run_workers(["sh", "-c", "exit 3"], 60) == {"exit_code": 3, "late": False}


def test_what_fails_is_written_down_and_the_rest_is_measured(tmp_path, monkeypatch) -> None:
    file = tmp_path / "checkup-node1.json"
    found: dict = {}

    def fail() -> None:
        raise ValueError("no such thing")

    checkup.measure(file, found, "limits", fail)
    checkup.measure(file, found, "versions", lambda: {"kernel": "6"})
    seen = json.loads(file.read_text())
    assert seen["limits"] == {"problem": "ValueError: no such thing"}
    assert seen["versions"] == {"kernel": "6"}


def test_the_limit_of_open_files_is_raised_as_in_a_job() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))\n"
        "from trnslurm.node.preflight import checkup; checkup.raise_open_files(2)\n"
        "print(checkup.limits()['files'])"
    )
    done = run_process([sys.executable, "-c", code])
    assert done.ok == "128\n"
