"""The stand-in of neuron_parallel_compile prints, returns and fails as its behaviours say."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from .stand_ins import NOTICE, assert_waits

pytestmark = pytest.mark.rest

SAY_PID = "echo $$ > pid.new; mv pid.new pid"
RUN_ON = f"{SAY_PID}; while :; do sleep 0.05; done"


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
        ("locked", 0, [0, 0, 0], "Extracting graphs"),
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
        ("hang", "New graph list from script 4", signal.SIGTERM),
        ("hang", "New graph list from script 4", signal.SIGINT),
        ("stale-lock", "Another process must be compiling", signal.SIGTERM),
    ],
)
def test_compile_behaviours_that_wait_end_by_a_signal(stage, behaviour, line, signum):
    stage.fault("neuron_parallel_compile", behaviour)
    process = stage.start("neuron_parallel_compile", "echo", "ran")
    await_line(process, line)
    assert_waits(process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=600)
    assert process.returncode == -signum
    assert totals(out) == []
    assert err == NOTICE.format("neuron_parallel_compile")


def test_slow_compiles_go_on_until_another_behaviour(stage):
    stage.fault("neuron_parallel_compile", "slow")
    process = stage.start("neuron_parallel_compile", "echo", "ran")
    await_line(process, "Compiling")
    assert_waits(process)
    stage.fault("neuron_parallel_compile", "failed-graphs")
    out, _ = process.communicate(timeout=600)
    assert (process.returncode, totals(out)) == (2, [4, 2, 2])


def test_a_compile_that_failed_is_remembered_until_a_retry_succeeds(stage):
    stage.fault("neuron_parallel_compile", "slow")
    process = stage.start("neuron_parallel_compile", "echo", "ran")
    await_line(process, "Compiling")
    process.terminate()
    process.communicate(timeout=600)
    assert process.returncode == -signal.SIGTERM
    stage.fault("neuron_parallel_compile", "ok")
    code, out, _ = stage.run("neuron_parallel_compile", "true")
    assert (code, totals(out)) == (0, [])
    assert out.count("Got a cached failed neff at ") == 4 and "No todo hlos found" in out
    flags = {"NEURON_CC_FLAGS": "-O1 --retry_failed_compilation"}
    code, out, _ = stage.run("neuron_parallel_compile", "true", **flags)
    assert (code, totals(out)) == (0, [4, 4, 0])
    code, out, _ = stage.run("neuron_parallel_compile", "true")
    assert (code, totals(out)) == (0, [4, 4, 0])


@pytest.mark.parametrize("command", [("sh", "-c", "exit 7"), ("sh", "-c", "kill -9 $$"), ("./no",)])
def test_compile_compiles_nothing_after_a_failed_command(stage, command):
    code, out, _ = stage.run("neuron_parallel_compile", *command)
    assert code == 1
    assert "There was an error in the training script." in out
    assert totals(out) == []
    ignore = {"NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE": "1"}
    code, out, _ = stage.run("neuron_parallel_compile", *command, **ignore)
    assert (code, totals(out)) == (0, [4, 4, 0])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_compile_ends_its_command_first_when_signalled(stage, signum):
    process = stage.start("neuron_parallel_compile", "sh", "-c", f"{SAY_PID}; exec sleep 600")
    pid = int(stage.await_file("pid"))
    process.send_signal(signum)
    out, _ = process.communicate(timeout=600)  # until the command, too, has closed it
    assert process.returncode == -signum
    assert totals(out) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_compile_waits_for_a_command_that_cleans_up_after_a_signal(stage):
    script = f"trap 'echo cleaned; exit 0' TERM; {RUN_ON}"
    process = stage.start("neuron_parallel_compile", "bash", "-c", script)
    stage.await_file("pid")
    process.terminate()
    out, _ = process.communicate(timeout=600)
    assert (process.returncode, out) == (-signal.SIGTERM, "cleaned\n")


def test_compile_passes_other_signals_on_and_goes_on(stage):
    script = f"trap 'echo warned; exit 0' USR1; {RUN_ON}"
    process = stage.start("neuron_parallel_compile", "bash", "-c", script)
    stage.await_file("pid")
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=600)
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
    out, _ = first.communicate(timeout=600)
    assert first.returncode == 1
    assert "was deleted by a second run" in out
    assert totals(out) == []


def test_compile_phases_can_be_run_apart(stage):
    stage.fault("neuron_parallel_compile", "failed-graphs")
    done = stage.run("neuron_parallel_compile", "--command", "collect", "echo", "--command", "-x")
    assert done == (0, "--command -x\n", "")
    assert stage.run("neuron_parallel_compile", "--command=collect", "false")[0] == 1
    code, out, _ = stage.run("neuron_parallel_compile", "--command", "compile", "echo", "ran")
    assert code == 2
    assert totals(out) == [4, 2, 2]
    assert "ran\n" not in out
