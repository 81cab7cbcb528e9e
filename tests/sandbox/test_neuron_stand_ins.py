"""The stand-ins of the Neuron tools print, return and fail as their behaviours say."""

import contextlib
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "trnslurm/sandbox/neuron_stand_ins.py"
TRN1_32XL = {
    "instance_type": "trn1.32xlarge",
    "devices": 16,
    "cores_per_device": 2,
    "device_gib": 32,
}
NOTICE = "{}: this is a stand-in of a trnslurm sandbox, not a Neuron tool\n"
CAPTURED = """
+--------+--------+----------+--------+---------------+--------------+--------------+------+
| NEURON | NEURON |  NEURON  | NEURON |   CONNECTED   |     PCI      |     CPU      | NUMA |
| DEVICE | CORES  | CORE IDS | MEMORY |    DEVICES    |     BDF      |   AFFINITY   | NODE |
+--------+--------+----------+--------+---------------+--------------+--------------+------+
| 0      | 2      | 0-1      | 32 GB  | 12, 3, 4, 1   | 0000:10:1b.0 | 0-31,64-95   | 0    |
| 15     | 2      | 30-31    | 32 GB  | 11, 14, 3, 12 | 0000:a0:1d.0 | 32-63,96-127 | 1    |
+--------+--------+----------+--------+---------------+--------------+--------------+------+
"""
SAY_PID = "echo $$ > pid.new; mv pid.new pid"
RUN_ON = f"{SAY_PID}; while :; do sleep 0.05; done"


def hear_signals():
    """Undo what nohup or a background job did to the signals that the tests send."""
    for signum in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)


class Stage:
    """A directory with an awkward name that the stand-ins play on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = directory / 'it\'s a "home"'
        self.started: list[subprocess.Popen[str]] = []
        self.home.mkdir()
        self.play(TRN1_32XL)

    def play(self, instance: object) -> None:
        """Choose the instance."""
        (self.home / "instance.json").write_text(json.dumps(instance))

    def fault(self, tool: str, behaviour: str, host: str = "all") -> None:
        """Choose a behaviour."""
        (self.home / host).mkdir(exist_ok=True)
        (self.home / host / tool).write_text(f" {behaviour}\n")

    def start(self, *arguments: str, **environ: str) -> "subprocess.Popen[str]":
        """Start a stand-in."""
        process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT), "--home", str(self.home), *arguments],
            cwd=self.directory,
            env=os.environ
            | {"USER": "ada", "NEURON_COMPILE_CACHE_URL": f"{self.directory}/cache"}
            | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=hear_signals,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, **environ: str) -> tuple[int, str, str]:
        """Run a stand-in to its end; exit code, stdout, and stderr without the notice."""
        process = self.start(*arguments, **environ)
        out, err = process.communicate(timeout=10)
        notice = NOTICE.format(arguments[0])
        assert err.startswith(notice)
        return process.returncode, out, err.removeprefix(notice)

    def await_file(self, name: str) -> str:
        """Wait for a file that appears whole."""
        deadline = time.monotonic() + 10
        while not (self.directory / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.01)
        return (self.directory / name).read_text()


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    for process in stage.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the command that a failed test left
        process.wait(5)
        process.stdout.close()
        process.stderr.close()


def totals(out):
    """The three numbers of the summary: graphs, successful, failed."""
    line = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}:  \d+  INFO \|\|NEURON_PARALLEL_COMPILE\|\|: "
    names = ("Total graphs", "Total successful compilations", "Total failed compilations")
    return [int(number) for n in names for number in re.findall(rf"{line}{n}: (\d+)$", out, re.M)]


def await_line(process, text):
    """Read stdout until a line with a text comes."""
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"no {text}")


def assert_waits(process):
    """It neither ends nor prints for a while."""
    readable, _, _ = select.select([process.stdout], [], [], 0.2)
    assert not readable
    assert process.poll() is None


# neuron_parallel_compile


def test_compile_runs_the_command_and_reports_every_graph(stage):
    command = ("sh", "-c", 'echo "$NEURON_EXTRACT_GRAPHS_ONLY $1"; echo oops >&2', "sh", "a b")
    code, out, err = stage.run("neuron_parallel_compile", *command)
    assert (code, err) == (0, "")
    assert out.startswith("1 a b\noops\n")  # stderr joins stdout
    assert totals(out) == [4, 4, 0]
    report = json.loads(re.search(r"\|\|: (\{\n.*?^\})", out, re.M | re.S)[1])
    assert report["compilation_summary"] == {"true": 4}
    assert len(report["compilation_report"]) == 4
    for path, result in report["compilation_report"].items():
        assert path.startswith(f"{stage.directory}/cache/")
        assert f"Extracting graphs ({path})" in out
        assert Path(path).with_name("model.neff").is_file()
        assert result == {"status": True, "retry": 0, "compile_time": 0.0}


def test_compile_options_of_the_command_stay_with_the_command(stage):
    echo = ("echo", "--command", "collect", "--help", "--", "-x")
    code, out, _ = stage.run("neuron_parallel_compile", *echo)
    assert code == 0
    assert out.startswith("--command collect --help -- -x\n")
    assert totals(out) == [4, 4, 0]


@pytest.mark.parametrize(
    ("behaviour", "code", "summary", "line"),
    [
        ("ok", 0, [4, 4, 0], "ran"),
        ("failed-graphs", 2, [4, 2, 2], "exit status 70"),
        ("killed", 2, [4, 2, 2], "Received error code: -9"),
        ("failed-old", 0, [4, 2, 2], "exit status 70"),
        ("failed-256", 0, [256, 0, 256], "exit status 70"),
        ("exception", 0, [2, 2, 0], "INFO ||NEURON_PARALLEL_COMPILE||: sub-process 1 got exc"),
        ("no-graphs", 0, [], "No todo hlos found"),
        ("script-error", 1, [], "There was an error in the training script."),
    ],
)
def test_compile_behaviours_that_end(stage, behaviour, code, summary, line):
    stage.fault("neuron_parallel_compile", behaviour)
    result, out, _ = stage.run("neuron_parallel_compile", "echo", "ran")
    assert result == code
    assert out.startswith("ran\n")  # the command always runs
    assert totals(out) == summary
    assert line in out
    failed = summary[2] if summary else 0
    assert out.count("  ERROR ||") == failed + (behaviour == "script-error")
    cache = stage.directory / "cache"
    assert len(list(cache.glob("*/*/model.neff"))) == (summary[1] if summary else 0)


@pytest.mark.parametrize(
    ("behaviour", "line", "signum"),
    [
        ("hang", "MODULE_4", signal.SIGTERM),
        ("hang", "MODULE_4", signal.SIGINT),
        ("stale-lock", "Another process must be compiling", signal.SIGTERM),
    ],
)
def test_compile_behaviours_that_wait_end_by_a_signal(stage, behaviour, line, signum):
    stage.fault("neuron_parallel_compile", behaviour)
    process = stage.start("neuron_parallel_compile", "echo", "ran")
    await_line(process, line)
    assert_waits(process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=5)
    assert process.returncode == -signum
    assert totals(out) == []
    assert err == NOTICE.format("neuron_parallel_compile")


@pytest.mark.parametrize("command", [("sh", "-c", "exit 7"), ("sh", "-c", "kill -9 $$"), ("./no",)])
def test_compile_compiles_nothing_after_a_failed_command(stage, command):
    code, out, _ = stage.run("neuron_parallel_compile", *command)
    assert code == 1
    assert "There was an error in the training script." in out
    assert totals(out) == []


def test_compile_can_be_told_to_ignore_a_failed_command(stage):
    ignore = {"NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE": "1"}
    code, out, _ = stage.run("neuron_parallel_compile", "false", **ignore)
    assert code == 0
    assert totals(out) == [4, 4, 0]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_compile_ends_its_command_first_when_signalled(stage, signum):
    process = stage.start("neuron_parallel_compile", "sh", "-c", f"{SAY_PID}; exec sleep 60")
    pid = int(stage.await_file("pid"))
    process.send_signal(signum)
    out, _ = process.communicate(timeout=5)  # until the command, too, has closed it
    assert process.returncode == -signum
    assert totals(out) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_compile_waits_for_a_command_that_cleans_up_after_a_signal(stage):
    script = f"trap 'echo cleaned; exit 0' TERM; {RUN_ON}"
    process = stage.start("neuron_parallel_compile", "bash", "-c", script)
    stage.await_file("pid")
    process.terminate()
    out, _ = process.communicate(timeout=5)
    assert (process.returncode, out) == (-signal.SIGTERM, "cleaned\n")


def test_compile_passes_other_signals_on_and_goes_on(stage):
    script = f"trap 'echo warned; exit 0' USR1; {RUN_ON}"
    process = stage.start("neuron_parallel_compile", "bash", "-c", script)
    stage.await_file("pid")
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=5)
    assert process.returncode == 0
    assert out.startswith("warned\n")
    assert totals(out) == [4, 4, 0]


def test_compile_is_broken_by_a_second_run_on_the_same_node(stage):
    wait = "echo > pid; until [ -e go ]; do sleep 0.02; done"
    first = stage.start("neuron_parallel_compile", "sh", "-c", wait)
    stage.await_file("pid")
    assert stage.run("neuron_parallel_compile", "true", USER="bob")[0] == 0
    assert stage.run("neuron_parallel_compile", "true")[0] == 0  # the same user: ada
    (stage.directory / "go").touch()
    out, _ = first.communicate(timeout=5)
    assert first.returncode == 1
    assert "was deleted by a second run" in out
    assert totals(out) == []


def test_compile_phases_can_be_run_apart(stage):
    stage.fault("neuron_parallel_compile", "failed-graphs")
    assert stage.run("neuron_parallel_compile", "--command", "collect", "echo", "1") == (
        0,
        "1\n",
        "",
    )
    assert stage.run("neuron_parallel_compile", "--command=collect", "false")[0] == 1
    code, out, _ = stage.run("neuron_parallel_compile", "--command", "compile", "echo", "ran")
    assert code == 2
    assert totals(out) == [4, 2, 2]
    assert "ran\n" not in out


def test_compile_without_a_command_is_success(stage):
    code, out, _ = stage.run("neuron_parallel_compile")
    assert code == 0
    assert out.startswith("usage: ")


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
    assert (device["connected_to"], device["bdf"], device["numa_node"]) == (
        None,
        "0000:00:1e.0",
        "-1",
    )
    assert "CONNECTED" not in stage.run("neuron-ls")[1]


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


@pytest.mark.parametrize("options", ["--wide --show-all-procs --topology", "-w -a -t"])
def test_ls_options_are_accepted(stage, options):
    code, out, _ = stage.run("neuron-ls", *options.split())
    assert code == 0
    assert "| 15     |" in out


def test_ls_version(stage):
    code, out, _ = stage.run("neuron-ls", "--version")
    assert code == 0
    assert "stand-in" in out


# neuron-monitor


def test_monitor_prints_a_document_per_period(stage):
    (stage.directory / "monitor.conf").write_text('{"period": "50ms", "system_metrics": []}')
    process = stage.start("neuron-monitor", "-c", "monitor.conf", "--verbose", "4")
    documents = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.terminate()
    assert process.wait(5) == -signal.SIGTERM
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


def test_monitor_prints_at_once_and_then_every_five_seconds(stage):
    process = stage.start("neuron-monitor")
    assert json.loads(process.stdout.readline())["system_data"]["neuron_hw_counters"]["period"] == 5
    assert_waits(process)


def test_monitor_hbm_error(stage):
    stage.fault("neuron-monitor", "hbm-error")
    document = json.loads(stage.start("neuron-monitor").stdout.readline())
    devices = document["system_data"]["neuron_hw_counters"]["neuron_devices"]
    assert [device["mem_ecc_uncorrected"] for device in devices] == [1] + 15 * [0]


def test_monitor_silent(stage):
    stage.fault("neuron-monitor", "silent")
    process = stage.start("neuron-monitor")
    assert process.stderr.readline() == NOTICE.format("neuron-monitor")
    assert_waits(process)
    process.terminate()
    assert process.communicate(timeout=5) == ("", "")


def test_monitor_exit(stage):
    stage.fault("neuron-monitor", "exit")
    assert stage.run("neuron-monitor") == (1, "", "")


def test_monitor_ends_without_a_word_when_its_reader_goes_away(stage):
    (stage.directory / "monitor.conf").write_text('{"period": "0.02s"}')
    process = stage.start("neuron-monitor", "--config-file", "monitor.conf")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(5) == -signal.SIGPIPE
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
        rf'error: {re.escape(str(path))}: unknown behaviour "{word}".* ok, .*\n', err
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
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    notice, error = result.stderr.splitlines()
    assert "stand-in" in notice
    assert error.startswith("error: usage: ")


def test_every_behaviour_is_explained_and_tested():
    behaviours = runpy.run_path(str(SCRIPT))["BEHAVIOURS"]
    assert list(behaviours) == ["neuron_parallel_compile", "neuron-ls", "neuron-monitor"]
    tests = Path(__file__).read_text()
    for tool, lines in behaviours.items():
        assert next(iter(lines)) == "ok"
        assert all(f'"{word}"' in tests and line for word, line in lines.items()), tool
