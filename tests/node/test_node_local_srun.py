"""The stand-in for srun: kill on bad exit, exit codes, one log per node, no stray process."""

import signal
import sys

import pytest

FOR_EVER = "while :; do sleep 0.2; done\n"


def test_each_node_knows_where_it_is_and_has_a_log_of_its_own(bench):
    (bench.directory / "my logs").mkdir()
    (bench.directory / "my logs" / "node1.log").write_text("before\n")
    bench.environ |= {"SLURM_NODEID": "9", "SLURM_NNODES": "9"}
    show = (
        "echo $SLURM_NNODES $SLURM_JOB_NUM_NODES $SLURM_NODEID $SLURM_PROCID $SLURM_LOCALID"
        ' $SLURM_NTASKS_PER_NODE $SLURMD_NODENAME "$@"; cat'
    )
    result = bench.run(
        "local_srun", "--nodes", "3", "--output", "my logs/node%n.log",
        "--", "bash", "-c", show, "bash", "it's", "--", "-x",
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert bench.read("my logs/node0.log") == "3 3 0 0 0 1 local-0 it's -- -x\n"
    assert bench.read("my logs/node1.log") == "before\n3 3 1 1 0 1 local-1 it's -- -x\n"
    assert bench.read("my logs/node2.log") == "3 3 2 2 0 1 local-2 it's -- -x\n"


def test_the_first_failure_ends_the_other_nodes_and_gives_the_exit_code(bench):
    # The others would exit 99 on TERM: more than 3, yet not the cause.
    script = bench.script(
        "node.sh",
        "trap 'exit 99' TERM\ntouch ready-$SLURM_NODEID\n"
        "if [ $SLURM_NODEID = 1 ]; then\n"
        "  until [ -e ready-0 ] && [ -e ready-2 ]; do sleep 0.02; done; exit 3\n"
        "fi\n" + FOR_EVER,
    )
    result = bench.run("local_srun", "--nodes", "3", "--output", "log", "--", "bash", script)
    assert result.returncode == 3
    assert result.stderr == "local_srun: node 1 exited with code 3; ending the other nodes\n"


@pytest.mark.parametrize(("line", "code"), [("exit 0", 0), ("exit 75", 75), ("kill -KILL $$", 137)])
def test_exit_code(bench, line, code):
    assert bench.run("local_srun", "--nodes", "2", "--", "bash", "-c", line).returncode == code


def test_nodes_that_ignore_term_are_killed_with_all_they_started(bench, stubborn_tree):
    script = bench.script(
        "node.sh",
        "if [ $SLURM_NODEID = 0 ]; then\n"
        "  until [ -e up ]; do sleep 0.02; done; exit 4\n"
        "fi\n"
        "trap '' TERM\n" + stubborn_tree + "touch up\n" + FOR_EVER,
    )
    result = bench.run("local_srun", "--nodes", "2", "--kill-wait", "0.2", "--", "bash", script)
    assert result.returncode == 4
    assert bench.pid_in("daemon.pid")
    assert bench.alive() == []


def test_strays_are_ended_when_all_nodes_succeed(bench, stubborn_tree):
    script = bench.script("node.sh", stubborn_tree)
    assert bench.run("local_srun", "--nodes", "1", "--", "bash", script).returncode == 0
    assert bench.pid_in("daemon.pid")
    assert bench.alive() == []


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_all_nodes_with_term(bench, signum, code):
    script = bench.script(
        "node.sh",
        "trap 'touch termed-$SLURM_NODEID; exit 0' TERM\ntouch ready-$SLURM_NODEID\n" + FOR_EVER,
    )
    srun = bench.program("local_srun", "--nodes", "2", "--", "bash", script)
    bench.await_files("ready-0", "ready-1")
    srun.send_signal(signum)
    assert srun.wait(600) == code
    assert bench.has("termed-0")
    assert bench.has("termed-1")
    assert bench.alive() == []


def test_usr1_is_neither_fatal_nor_forwarded(bench):
    script = bench.script(
        "node.sh",
        "trap 'exit 8' USR1\ntouch ready-$SLURM_NODEID\nuntil [ -e go ]; do sleep 0.02; done\n",
    )
    srun = bench.program("local_srun", "--nodes", "2", "--", "bash", script)
    bench.await_files("ready-0", "ready-1")
    srun.send_signal(signal.SIGUSR1)
    (bench.directory / "go").touch()
    assert srun.wait(600) == 0


def test_nodes_end_with_the_script_that_started_them(bench):
    script = bench.script("node.sh", "touch ready-$SLURM_NODEID\n" + FOR_EVER)
    batch = bench.start(
        "bash", "-c", '"$@" & wait', "bash",
        sys.executable, "-m", "trnslurm.node.local_srun", "--nodes", "2", "--", "bash", script,
    )  # fmt: skip
    bench.await_files("ready-0", "ready-1")
    batch.kill()
    bench.await_none_alive()


@pytest.mark.parametrize(
    "options", [["--nodes", "2", "--output", "missing/%n.log"], ["--nodes", "0"], ["--nodes", "x"]]
)
def test_a_wrong_option_starts_nothing(bench, options):
    result = bench.run("local_srun", *options, "--", "touch", "started")
    assert result.returncode in (1, 2)
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr
    assert not bench.has("started")


def test_a_command_that_does_not_exist_is_an_error_of_its_node(bench):
    result = bench.run("local_srun", "--nodes", "1", "--", "no-such-command")
    assert result.returncode == 127
    assert "error: cannot run no-such-command: No such file or directory" in result.stderr
