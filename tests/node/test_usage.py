"""What a node notes about its use: real figures of this machine, stand-ins for devices' tools."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trnslurm.contract.rundir import RunFiles
from trnslurm.devices import CPU, CUDA
from trnslurm.node.accelerators.accelerator import accelerator_of
from trnslurm.node.accelerators.neuron import read_neuron_monitor
from trnslurm.node.accelerators.nvidia import read_nvidia_smi
from trnslurm.node.usage import __main__ as program
from trnslurm.node.usage.devices import (
    DeviceReport,
    Devices,
    DeviceUse,
    Tool,
)
from trnslurm.node.usage.host import Host
from trnslurm.node.usage.notice import Look, Notices
from trnslurm.node.usage.read import newest_lines, notices

from ..waiting import eventually

PRINTED = Path(__file__).with_name("device_tools")
CODE = Path(__file__).parents[2]
GPUS = read_nvidia_smi((PRINTED / "nvidia-smi.csv").read_text().splitlines())


def test_tools_of_the_vendors_are_read() -> None:
    assert GPUS and GPUS.kind == "GPU"
    assert GPUS.devices[0] == DeviceUse(0.98, 70012 / 1024, 655.21, 1755.0)
    assert GPUS.devices[1].slowed_by == "heat"
    assert GPUS.devices[3] == DeviceUse(None, 40.0, None, 1410.0)
    assert GPUS.errors["GPU 1: uncorrected memory errors"] == 3
    for line in (PRINTED / "nvidia-smi-h200.csv").read_text().splitlines():
        assert (h200 := read_nvidia_smi([line])) and not h200.devices[0].slowed_by
        assert h200.errors == {"GPU 0: uncorrected memory errors": 0}
    text = (PRINTED / "neuron-monitor.json").read_text()
    cores = read_neuron_monitor(["not JSON", text, '{"cut": '])
    assert cores and cores.devices == {
        0: DeviceUse(use=0.935, memory_gib=10.0),
        1: DeviceUse(use=0.88, memory_gib=10.0),
    }
    assert cores.errors == {
        "executions with hardware errors": 1,
        "executions with runtime errors": 0,
        "Neuron device 0: uncorrected memory errors": 0,
        "Neuron device 0: uncorrected SRAM errors": 2,
    }


@pytest.mark.parametrize("line", ["", "[]", "1, 2", "null", "Unable to determine the device"])
def test_other_output_is_nothing(line: str) -> None:
    assert read_nvidia_smi([line]) is None
    found = read_neuron_monitor([line])
    assert found is None or not found.devices


@pytest.mark.parametrize("key", ["neuron_runtime_data", "system_data"])
@pytest.mark.parametrize("value", [None, 3, [None], {"neuron_hw_counters": []}, [{"report": 1}]])
def test_odd_reports_have_no_devices(key: str, value: object) -> None:
    found = read_neuron_monitor([json.dumps({key: value})])
    assert found == DeviceReport("NeuronCore", {}, {})


@pytest.fixture
def tool(tmp_path: Path) -> Iterator[Callable[..., Devices]]:
    made: list[Devices] = []

    def make(*scripts: str) -> Devices:
        tools = [Tool(["bash", "-c", script], read_nvidia_smi) for script in scripts]
        made.append(Devices(tools or [Tool([str(tmp_path / "missing")], read_nvidia_smi)]))
        return made[-1]

    yield make
    for devices in made:
        devices.close()


def test_a_report_comes_while_the_tool_runs(tool: Callable[..., Devices]) -> None:
    devices = tool(f"cat {PRINTED / 'nvidia-smi.csv'}; exec sleep 600")
    assert eventually(devices.report) == GPUS
    assert devices.report() is None  # nothing new


def test_the_next_tool_is_tried(tool: Callable[..., Devices]) -> None:
    devices = tool("echo Field is not valid; exit 2", f"cat {PRINTED / 'nvidia-smi.csv'}")
    assert eventually(devices.report) == GPUS


def test_bad_tools_do_no_harm(tool: Callable[..., Devices]) -> None:
    assert tool().report() is None
    silent = tool("exec sleep 600")
    assert silent.report() is None  # at once
    assert silent.report() is None
    chatty = tool("yes garbage")
    for _ in range(3):
        assert chatty.report() is None


def test_nvidia_smi_asks_for_this_jobs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    first, *others = accelerator_of(CUDA).usage_tools(10.0)
    assert "--id=2,3" in first.command and "--loop=10" in first.command
    assert len(others) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "$(date)")
    assert not any("--id" in word for word in accelerator_of(CUDA).usage_tools(10.0)[0].command)
    assert accelerator_of(CPU).usage_tools(10.0) == []


@pytest.mark.parametrize("second", ["rdmap32s27", "ibp198s0f0", "mlx5_0"])
def test_counters_of_the_kernel(tmp_path: Path, second: str) -> None:
    first = "mlx5_1" if second == "mlx5_0" else "efa_0"
    own = min(os.sched_getaffinity(0))

    def write(busy: int, received: int, words: int, downed: int) -> None:
        files = {
            "proc/stat": f"cpu{own} {busy} 0 0 100 0 0 0 0 0 0\ncpu999 5 5 5 5 5 5 5 5\n",
            "proc/net/dev": "a\nb\n    lo: 9999 0 0 0 0 0 0 0 9999 0\n"
            f"  eth0: {received} 0 0 0 0 0 0 0 {2 * received} 0 0\n",
            f"sys/class/infiniband/{first}/ports/1/hw_counters/rx_bytes": f"{received}\n",
            f"sys/class/infiniband/{first}/ports/1/hw_counters/tx_bytes": "0\n",
            f"sys/class/infiniband/{second}/ports/1/counters/port_rcv_data": f"{words}\n",
            f"sys/class/infiniband/{second}/ports/1/counters/port_xmit_data": "0\n",
            f"sys/class/infiniband/{second}/ports/1/counters/link_downed": f"{downed}\n",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    write(0, 0, 0, 0)
    host = Host(tmp_path, tmp_path)
    write(300, 1_000_000, 250_000, 1)
    found = host.look()
    assert found["cpu"] == 1.0  # no tick was idle
    assert found["net_out_mb_s"] == pytest.approx(2 * found["net_in_mb_s"])
    counted = second != "ibp198s0f0"  # a controller of NVLink beside EFA
    assert found["fabric_in_mb_s"] == pytest.approx((1 + counted) * found["net_in_mb_s"])
    assert 0 < found["memory_left_gib"] <= found["memory_gib"]
    assert host.errors() == ({f"{second}: the link went down": 1} if counted else {})


def run_looks(
    looks: Callable[[float], tuple[dict[str, float], DeviceReport | None]],
    hours: float,
    *,
    devices: bool = True,
) -> Notices:
    """Let a node be looked at every ten seconds."""
    found = Notices(devices=devices)
    for second in range(0, int(3600 * hours), 10):
        figures, report = looks(float(second))
        found.look(Look(float(second), figures, report), dict(report.errors) if report else {})
    return found


def gpus(*shares: float, slowed_by: str = "") -> DeviceReport:
    devices = {
        n: DeviceUse(share, 10.0, 300.0, 1100.0, slowed_by) for n, share in enumerate(shares)
    }
    return DeviceReport("GPU", devices, {})


def texts(found: Notices) -> list[str]:
    return [notice.text for notice in found.all if notice.until is None]


def test_idle_devices() -> None:
    some = run_looks(lambda _: ({"cpu": 0.1}, gpus(0.9, 0.8, 0.0, 0.95)), 0.5)
    assert texts(some) == ["GPU 2 did nothing for 10 min while others worked"]
    none = run_looks(lambda _: ({"cpu": 0.43}, gpus(0.0, 0.0)), 0.5)
    assert texts(none) == ["no GPU did anything for 10 min; the CPUs are 43% busy"]
    begins = run_looks(lambda at: ({}, gpus(*[float(at > 550)] * 2)), 0.5)
    assert not begins.all  # a model was loaded for nine minutes
    works_again = run_looks(lambda at: ({}, gpus(0.9, float(at > 1200))), 0.5)
    assert [notice.until is None for notice in works_again.all] == [False]
    assert not run_looks(lambda _: ({}, gpus(0.0, 0.9)), 0.5, devices=False).all


def test_starved_devices_and_slow_clocks() -> None:
    starved = run_looks(lambda _: ({"cpu": 0.99}, gpus(0.3, 0.4)), 0.5)
    assert [text.split(":")[0] for text in texts(starved)] == [
        "the devices compute only 35% of the time, and all CPUs are busy"
    ]
    hot = run_looks(lambda _: ({}, gpus(0.9, 0.9, slowed_by="heat")), 0.5)
    assert texts(hot) == ["GPUs 0, 1: clock lowered by heat, to 1100 MHz"]


def test_errors_that_rise() -> None:
    name = "GPU 0: uncorrected memory errors"
    found = run_looks(lambda at: ({}, DeviceReport("GPU", {}, {name: 7 + int(at > 60)})), 0.1)
    assert texts(found) == [f"{name} (1 since the start)"]


def test_memory_that_runs_out() -> None:
    def leaks(at: float) -> tuple[dict[str, float], None]:
        left = 400 - at / 3600 * 40 + random.uniform(-1, 1)
        return {"memory_left_gib": left, "memory_gib": 480.0}, None

    (text,) = texts(run_looks(leaks, 2))
    assert re.match(r"available memory shrinks by (39|40|41)\.\d GiB per hour", text)

    def short(_: float) -> tuple[dict[str, float], None]:
        return {"memory_left_gib": 1.0, "memory_gib": 480.0, "shm_left_gib": 0.01}, None

    assert texts(run_looks(short, 0.1)) == [
        "only 1.0 of 480 GiB of memory are left",
        "/dev/shm has 10 MiB left",
    ]


def test_healthy_nodes_have_no_notice() -> None:
    """Eight hours: caches fill, epochs come and go, evaluations and saves pause the devices."""
    random.seed(5)

    def healthy(at: float) -> tuple[dict[str, float], DeviceReport]:
        pause = at % 3600 < 200  # an evaluation on one device
        shares = [0.0 if pause and n else random.uniform(0.7, 1.0) for n in range(8)]
        filled = 60 * (1 - math.exp(-at / 600))
        left = 400 - filled - 15 * (at % 5400) / 5400 + random.uniform(-2, 2)
        figures = {"cpu": 0.3, "memory_left_gib": left, "memory_gib": 480.0, "write_ms": 40.0}
        return figures | {"shm_left_gib": 100.0}, gpus(*shares)

    assert not run_looks(healthy, 8).all


def test_the_program_notes_until_its_task_ends(tmp_path: Path) -> None:
    run, tools = RunFiles(tmp_path / "run"), tmp_path / "bin"
    run.state.mkdir(parents=True)
    tools.mkdir()
    run.state_file("train", 1).write_text("{}")
    # The tool reports after the first line of the file, so that the report is in the last line. It
    # has written all once the program has read all but what a pipe holds: 64 KiB.
    done, first = tmp_path / "done", run.usage_file(1)
    script = f"until [[ -s {first} ]]; do sleep 0.05; done; cat {PRINTED}/nvidia-smi.csv; "
    script += f"yes '' | head -c 200000; touch {done}; sleep 600"
    (tools / "nvidia-smi").write_text(f"#!/bin/bash\n{script}\n")
    (tools / "nvidia-smi").chmod(0o755)
    environ = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(CODE),
        "TRNSLURM_PHASE": "train",
        "TRNSLURM_ATTEMPT": "1",
        "TRNSLURM_DEVICE": "cuda",
    }
    with subprocess.Popen(["sleep", "600"]) as task:
        command = [sys.executable, "-m", "trnslurm.node.usage", f"--task={task.pid}"]
        command += ["--node=1", "--seconds=0.1"]
        with subprocess.Popen(command, cwd=run.path, env=environ) as usage:
            children = Path(f"/proc/{usage.pid}/task/{usage.pid}/children")
            tool = eventually(lambda: children.read_text().split())
            eventually(lambda: usage.poll() is not None or done.exists())
            task.kill()
            assert usage.wait(600) == 0
    (line,) = newest_lines(run, "train", 1).values()
    assert line["device_use"] == [0.98, 0.97, 0.0, None] and line["kind"] == "GPU"
    assert line["errors"] == {"GPU 1: uncorrected memory errors": 3}
    assert 0 <= line["cpu"] <= 1 and line["memory_left_gib"] > 0
    assert not list(notices(run, "train", 1))
    assert not Path(f"/proc/{tool[0]}").exists()


def test_the_node_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"PHASE": "judge", "ATTEMPT": "3", "SERVER": "1"}
    for name, value in values.items():
        monkeypatch.setenv(f"TRNSLURM_{name}", value)
    monkeypatch.setattr(program, "RUN", RunFiles(tmp_path))
    notes = program.NodeNotes(1, Devices([]))
    assert notes.begun()
    notes.look(0.0)
    notes.write(60.0)
    assert json.loads((tmp_path / "usage/judge-1.jsonl").read_text())["attempt"] == 3


def test_a_long_file_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_MOST_BYTES", 1000)
    file = tmp_path / "usage/node0.jsonl"
    for number in range(500):
        program.append(file, json.dumps({"number": number}))
    numbers = [json.loads(line)["number"] for line in file.read_text().splitlines()]
    assert file.stat().st_size < 1100
    assert numbers[0] < 50 and numbers[-1] == 499 and numbers == sorted(numbers)
