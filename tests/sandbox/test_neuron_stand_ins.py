"""The stand-ins of the Neuron tools print, return and fail as their behaviours say."""

import json
import os
import re
import runpy
import signal
import socket
import sys
from pathlib import Path

import pytest

from trnslurm.sandbox import neuron
from trnslurm.sandbox.layout import Layout

from ..processes import run_process
from .stand_ins import NOTICE, SCRIPT, TRN1_32XL, assert_waits

pytestmark = pytest.mark.rest

CAPTURED = """
+--------+--------+----------+--------+---------------+--------------+--------------+------+
| NEURON | NEURON |  NEURON  | NEURON |   CONNECTED   |     PCI      |     CPU      | NUMA |
| DEVICE | CORES  | CORE IDS | MEMORY |    DEVICES    |     BDF      |   AFFINITY   | NODE |
+--------+--------+----------+--------+---------------+--------------+--------------+------+
| 0      | 2      | 0-1      | 32 GB  | 12, 3, 4, 1   | 0000:10:1b.0 | 0-31,64-95   | 0    |
| 15     | 2      | 30-31    | 32 GB  | 11, 14, 3, 12 | 0000:a0:1d.0 | 32-63,96-127 | 1    |
+--------+--------+----------+--------+---------------+--------------+--------------+------+
"""


# neuron-ls


def test_ls_json_describes_every_device(stage):
    code, out, err = stage.run("neuron-ls", "--json-output")
    assert (code, err) == (0, "")
    assert out.endswith("]")  # no newline
    devices = json.loads(out)
    assert [device["neuron_device"] for device in devices] == list(range(16))
    assert [core for device in devices for core in device["neuroncore_ids"]] == list(range(32))
    assert devices[0] == {
        "neuron_device": 0,
        "bdf": "0000:10:1b.0",
        "cpu_affinity": "0-31,64-95",
        "numa_node": "0",
        "connected_to": [12, 3, 4, 1],
        "nc_count": 2,
        "memory_size": 32 * 2**30,
        "neuroncore_ids": [0, 1],
        "neuron_processes": [],
    }
    assert devices[6]["connected_to"] == [2, 5, 10, 7]
    assert devices[15]["connected_to"] == [11, 14, 3, 12]
    assert len({device["bdf"] for device in devices}) == 16
    for device in devices:  # links go both ways
        assert all(
            device["neuron_device"] in devices[n]["connected_to"] for n in device["connected_to"]
        )


def test_ls_table_as_captured_on_a_trn1(stage):
    code, out, err = stage.run("neuron-ls")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "instance-type: trn1.32xlarge"
    assert re.fullmatch(r"instance-id: i-0{17}", lines[1])
    assert "\n".join([*lines[2:7], *lines[-2:]]) == CAPTURED.strip()
    assert len(lines) == 6 + 16 + 1


def test_ls_of_a_small_instance_has_no_links(stage):
    stage.play(TRN1_32XL | {"instance_type": "trn1.2xlarge", "devices": 1})
    (device,) = json.loads(stage.run("neuron-ls", "-j")[1])
    place = (device["connected_to"], device["bdf"], device["numa_node"])
    assert place == (None, "0000:00:1e.0", "-1")
    assert "CONNECTED" not in stage.run("neuron-ls", "-w", "-a", "-t")[1]
    assert "stand-in" in stage.run("neuron-ls", "--version")[1]


def test_ls_missing_device(stage):
    stage.fault("neuron-ls", "missing-device")
    assert len(json.loads(stage.run("neuron-ls", "-j")[1])) == 15
    assert len(stage.run("neuron-ls")[1].splitlines()) == 6 + 15 + 1


def test_ls_no_devices(stage):
    stage.fault("neuron-ls", "no-devices")
    for arguments in ([], ["-j"]):
        code, out, err = stage.run("neuron-ls", *arguments)
        assert (code, out) == (1, "")
        assert re.fullmatch(r'time="\S+Z" level=fatal msg="[^"]+" error="[^"]+"\n', err)


def test_ls_busy_shows_a_process_that_nobody_can_kill(stage):
    stage.fault("neuron-ls", "busy")
    for device in json.loads(stage.run("neuron-ls", "-j")[1]):
        (process,) = device["neuron_processes"]
        assert process["command"]
        with pytest.raises(ProcessLookupError):
            os.kill(process["pid"], 0)
    out = stage.run("neuron-ls")[1]
    assert re.search(r"\|   PID   \| +COMMAND +\|.*\| RUNTIME \|", out)
    assert out.count(f"| {process['pid']} | {process['command']} |") == 16


# neuron-monitor


def test_monitor_prints_a_document_per_period(stage):
    (stage.directory / "monitor.conf").write_text('{"period": "50ms", "system_metrics": []}')
    process = stage.start("neuron-monitor", "-c", "monitor.conf", "--verbose", "4")
    documents = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.terminate()
    assert process.wait(180) == -signal.SIGTERM
    assert documents[0] == documents[2]
    keys = ["neuron_runtime_data", "system_data", "instance_info", "neuron_hardware_info"]
    assert list(documents[0]) == keys
    assert documents[0]["neuron_runtime_data"] == []
    assert documents[0]["instance_info"]["instance_type"] == "trn1.32xlarge"
    assert documents[0]["neuron_hardware_info"] == {
        "neuron_device_type": "trainium",
        "neuron_device_version": "v2",
        "neuroncore_version": "v2",
        "neuron_device_count": 16,
        "neuron_device_memory_size": 32 * 2**30,
        "neuroncore_per_device_count": 2,
        "logical_neuroncore_config": 1,
        "error": "",
    }
    counters = documents[0]["system_data"]["neuron_hw_counters"]
    assert counters["period"] == 0.05
    assert len(counters["neuron_devices"]) == 16
    assert not any(n for d in counters["neuron_devices"] for k, n in d.items() if "ecc" in k)


def test_monitor_behaviours(stage):
    stage.fault("neuron-monitor", "exit")
    assert stage.run("neuron-monitor") == (1, "", "")
    stage.fault("neuron-monitor", "hbm-error")
    process = stage.start("neuron-monitor")
    counters = json.loads(process.stdout.readline())["system_data"]["neuron_hw_counters"]
    errors = [device["mem_ecc_uncorrected"] for device in counters["neuron_devices"]]
    assert (counters["period"], errors) == (5, [1] + 15 * [0])
    assert_waits(process)
    stage.fault("neuron-monitor", "silent")
    process = stage.start("neuron-monitor")
    assert process.stderr.readline() == NOTICE.format("neuron-monitor")
    assert_waits(process)
    process.terminate()
    assert process.communicate(timeout=600) == ("", "")


def test_monitor_ends_without_a_word_when_its_reader_goes_away(stage):
    (stage.directory / "monitor.conf").write_text('{"period": "0.02s"}')
    process = stage.start("neuron-monitor", "--config-file", "monitor.conf")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(180) == -signal.SIGPIPE
    assert process.stderr.read() == NOTICE.format("neuron-monitor")


# all of them


def test_a_hosts_behaviour_goes_before_that_of_all(stage):
    stage.fault("neuron-monitor", "exit")
    stage.fault("neuron-monitor", "silent", host="another-host")
    assert stage.run("neuron-monitor")[0] == 1
    stage.fault("neuron-monitor", "ok", host=socket.gethostname())
    assert stage.start("neuron-monitor").stdout.readline()


@pytest.mark.parametrize(
    ("tool", "word"),
    [("neuron_parallel_compile", "busy"), ("neuron-ls", "borken"), ("neuron-monitor", "")],
)
def test_an_unknown_behaviour_is_one_error_line(stage, tool, word):
    stage.fault(tool, word)
    code, out, err = stage.run(tool, "true")
    assert (code, out) == (2, "")
    path = stage.home / "all" / tool
    assert re.fullmatch(
        rf'error: {re.escape(str(path))}: unknown behavior "{word}".* ok, .*\n', err
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("neuron-ls", "--no-such-option"),
        ("neuron-monitor", "--verbose", "9"),
        ("neuron-monitor", "-c", "missing.conf"),
        ("neuron-monitor", "-c", "bad.conf"),
        ("neuron_parallel_compile", "--command", "no-such-command"),
        ("neuron_parallel_compile", "--no-such-option", "true"),
    ],
)
def test_bad_usage(stage, arguments):
    (stage.directory / "bad.conf").write_text('{"period": "5 parsecs"}')
    code, out, err = stage.run(*arguments)
    assert (code, out) == (2, "")
    assert "error: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize("text", [None, "[]", "{}", '{"instance_type": "x", "devices": "many"}'])
def test_a_bad_instance_file_is_one_error_line(stage, text):
    path = stage.home / "instance.json"
    path.unlink() if text is None else path.write_text(text)
    code, out, err = stage.run("neuron-monitor" if text is None else "neuron-ls")
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: {re.escape(str(path))}: .*\n", err)


@pytest.mark.parametrize(
    "arguments", [(), ("--home",), ("--home", "x"), ("--home", "x", "neuron-top")]
)
def test_the_stand_in_itself_called_wrongly(arguments):
    command = [sys.executable, "-I", str(SCRIPT), *arguments]
    result = run_process(command)
    assert result.code == 2
    notice, error = result.err.splitlines()
    assert "stand-in" in notice
    assert error.startswith("error: usage: ")


# fi_info


def test_fi_info_lists_two_endpoints_of_every_interface(stage):
    stage.play(TRN1_32XL | {"efa": 8})
    code, out, err = stage.run("fi_info", "-p", "efa")
    assert (code, err, out.count("provider: efa\n")) == (0, "", 16)
    assert stage.run("fi_info", "-p", "efa", "-t", "FI_EP_RDM")[1].count("-rdm\n") == 8
    assert stage.run("fi_info", "-p", "tcp")[0] == 61
    assert "libfabric: 2.1" in stage.run("fi_info", "--version")[1]
    stage.fault("fi_info", "missing-interface")
    assert stage.run("fi_info", "-p", "efa")[1].count("-rdm\n") == 7
    stage.fault("fi_info", "no-provider")
    assert stage.run("fi_info", "-p", "efa") == (61, "", "fi_getinfo: -61 (No data available)\n")
    stage.fault("fi_info", "other-version")
    assert "libfabric: 1.22" in stage.run("fi_info", "--version")[1]


@pytest.mark.first
def test_every_behaviour_is_explained_and_tested():
    behaviours = runpy.run_path(str(SCRIPT))["BEHAVIORS"]
    assert list(behaviours) == ["neuron_parallel_compile", "neuron-ls", "neuron-monitor", "fi_info"]
    tests = "".join(p.read_text() for p in Path(__file__).parent.glob("test_neuron_*.py"))
    for tool, lines in behaviours.items():
        assert next(iter(lines)) == "ok"
        assert all(f'"{word}"' in tests and line for word, line in lines.items()), tool


def test_behaviour_changes_at_once_for_whoever_reads_it(tmp_path):
    layout = Layout(tmp_path)
    layout.neuron.mkdir()
    neuron.behave(layout, "all", "neuron_parallel_compile", "slow")
    file = layout.neuron / "all/neuron_parallel_compile"
    with file.open() as reader:
        neuron.behave(layout, "all", "neuron_parallel_compile", "ok")
        assert (reader.read(), file.read_text()) == ("slow\n", "ok\n")
    assert list(file.parent.iterdir()) == [file]
