"""The guard leaves no process behind, whatever dies, and tells the truth about exit codes."""

import os
import signal
import subprocess
import sys

import pytest

FOR_EVER = "while :; do sleep 0.2; done\n"
WITHOUT_PIDFD = (
    "import os, sys; del os.pidfd_open\n"
    "from trnslurm.node.guard import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture
def tree(bench, stubborn_tree):
    """A script that runs for ever over processes which ignore TERM."""
    return bench.script("tree.sh", stubborn_tree + "echo $PPID > supervisor.pid\n" + FOR_EVER)


def assert_tree_runs(bench):
    bench.pid_in("supervisor.pid")
    pids = {bench.pid_in(f"{name}.pid") for name in ("child", "orphan", "daemon")}
    assert pids <= {int(line.partition(":")[0]) for line in bench.alive()}


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -9),
    ],
)
def test_no_orphan_when_the_guard_is_signalled(bench, tree, signum, code):
    guard = bench.program("guard", "--", tree)
    assert_tree_runs(bench)
    guard.send_signal(signum)
    assert guard.wait(600) == code
    if signum != signal.SIGKILL:
        assert bench.alive() == []  # the guard returns only when all is over
    bench.await_none_alive()


def test_no_orphan_when_interrupted_and_then_killed_as_submitit_does(bench, tree):
    guard = bench.program("guard", "--grace", "1", "--", tree)
    assert_tree_runs(bench)
    guard.send_signal(signal.SIGINT)
    guard.send_signal(signal.SIGKILL)
    bench.await_none_alive()


def test_no_orphan_when_the_process_group_is_killed(bench, tree):
    guard = bench.start("setsid", sys.executable, "-m", "trnslurm.node.guard", "--", tree)
    assert_tree_runs(bench)
    os.killpg(guard.pid, signal.SIGKILL)
    bench.await_none_alive()


def test_no_orphan_when_the_supervisor_is_killed(bench, tree):
    guard = bench.program("guard", "--grace", "0.3", "--", tree)
    assert_tree_runs(bench)
    os.kill(bench.pid_in("supervisor.pid"), signal.SIGKILL)
    assert guard.wait(600) == 137
    assert bench.alive() == []


def test_no_orphan_when_the_parent_is_killed(bench, tree):
    parent = bench.start(
        "bash", "-c", '"$@" & wait', "bash", sys.executable, "-m", "trnslurm.node.guard", "--", tree
    )
    assert_tree_runs(bench)
    parent.kill()
    bench.await_none_alive()


@pytest.mark.parametrize("program", [["-m", "trnslurm.node.guard"], ["-c", WITHOUT_PIDFD]])
def test_no_orphan_when_the_watched_process_is_killed(bench, tree, program):
    with subprocess.Popen(["sleep", "1000"]) as watched:
        guard = bench.start(sys.executable, *program, "--watch-pid", str(watched.pid), "--", tree)
        assert_tree_runs(bench)
        watched.kill()
        # Not collected yet: the zombie has to count as gone.
        assert guard.wait(600) == 143
        assert bench.alive() == []
    assert f"process {watched.pid}, which this run belongs to, has ended" in guard.stderr.read()


def test_a_recycled_pid_is_not_taken_for_the_watched_process(bench):
    # Younger than the guard, which keeps the start time of the bash that becomes it.
    script = bench.script("run.sh", "touch started\n")
    age = "$(cut -d' ' -f22 /proc/$1/stat)"
    guard = bench.start(
        "bash",
        "-c",
        f"age() {{ echo {age}; }}; while sleep 1000 & [ $(age $!) = $(age $$) ]; do kill $!; done\n"
        f"exec '{sys.executable}' -m trnslurm.node.guard --watch-pid $! -- {script}",
    )
    assert guard.wait(600) == 143
    assert not bench.has("started")


def test_a_script_that_ignores_term_is_killed_after_the_grace(bench):
    script = bench.script("deaf.sh", "trap '' TERM\necho $$ > deaf.pid\n" + FOR_EVER)
    guard = bench.program("guard", "--grace", "0.2", "--", script)
    bench.pid_in("deaf.pid")
    guard.terminate()
    assert guard.wait(600) == 143
    assert bench.alive() == []


def test_term_reaches_the_script_alone_so_that_its_trap_decides(bench):
    bench.script(
        "step.sh",
        "trap 'echo term >> step.log' TERM\n"
        "trap 'echo usr1 >> step.log; over=yes' USR1\n"
        "touch step.ready\n"
        "until [ $over ]; do sleep 0.05; done\n",
    )
    script = bench.script(
        "batch.sh",
        "trap 'echo CANCELLED > state; kill -USR1 $step; wait $step; echo over >> state' TERM\n"
        "bash step.sh & step=$!\n"
        "touch batch.ready\n"
        "wait $step\n",
    )
    guard = bench.program("guard", "--", script)
    bench.await_files("step.ready", "batch.ready")
    guard.terminate()
    assert guard.wait(600) == 143
    assert bench.read("step.log") == "usr1\n"
    assert bench.read("state") == "CANCELLED\nover\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [("exit 0", 0), ("exit 3", 3), ("exit 144", 1), ("kill -KILL $$", 137), ("kill -TERM $$", 143)],
)
def test_exit_code_is_the_scripts_own(bench, line, code):
    assert bench.run("guard", "--", bench.script("end.sh", line + "\n")).returncode == code


def test_scripts_run_in_turn_and_stop_at_the_first_failure(bench):
    first = bench.script("1.sh", "echo 1 >> order\n")
    second = bench.script("2.sh", "echo 2 >> order; exit 7\n")
    third = bench.script("3.sh", "echo 3 >> order\n")
    assert bench.run("guard", "--", first, second, third).returncode == 7
    assert bench.read("order") == "1\n2\n"


def test_what_a_script_leaves_behind_is_gone_before_the_next_starts(bench, stubborn_tree):
    first = bench.script("1.sh", stubborn_tree)
    second = bench.script(
        "2.sh",
        "for name in child orphan daemon; do kill -0 $(< $name.pid) && exit 9; done; exit 0\n",
    )
    assert bench.run("guard", "--", first, second).returncode == 0


def test_each_script_appends_to_a_log_of_its_own(bench):
    (bench.directory / 'my "logs"').mkdir()
    (bench.directory / 'my "logs"' / "it's a train.log").write_text("before\n")
    scripts = (
        bench.script("warm up.sh", "echo warm\n"),
        bench.script("it's a train.sh", "ls /no >&2"),
    )
    result = bench.run("guard", "--output", 'my "logs"/%s.log', "--", *scripts)
    assert result.returncode == 2
    assert result.stdout == result.stderr == ""
    assert bench.read('my "logs"/warm up.log') == "warm\n"
    log = bench.read('my "logs"/it\'s a train.log')
    assert log.startswith("before\n")
    assert "/no" in log


def test_a_log_lies_beside_its_script(bench):
    (bench.directory / "other").mkdir()
    scripts = bench.script("a.sh", "echo a\n"), bench.script("other/b.sh", "echo b\n")
    assert bench.run("guard", "--output", "%s.log", "--", *scripts).returncode == 0
    assert (bench.read("a.log"), bench.read("other/b.log")) == ("a\n", "b\n")


@pytest.mark.parametrize("log", ["missing/run.log", "pipe-run.log"])
def test_a_log_that_cannot_be_written_is_one_line_of_error(bench, log):
    script = bench.script("run.sh", "touch started\n")
    os.mkfifo(bench.directory / "pipe-run.log")
    result = bench.run("guard", "--output", log.replace("run", "%s"), "--", script)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "error: guard:" in result.stderr
    assert log in result.stderr
    assert not bench.has("started")


@pytest.mark.parametrize("name", ["INT", "PIPE"])
def test_scripts_can_trap_signals_that_the_guard_was_started_to_ignore(bench, name):
    # What is ignored on entry cannot be trapped by bash. bash starts background commands with INT
    # ignored, and Python itself ignores PIPE.
    script = bench.script("trap.sh", f"trap 'exit 5' {name}\nkill -{name} $$\nexit 6\n")
    guard = bench.start(
        "bash", "-c", f"'{sys.executable}' -m trnslurm.node.guard -- {script} & wait $!"
    )
    assert guard.wait(600) == 5
