"""An attempt, run as a batch script runs it, with stand-ins of srun and scontrol on PATH."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trnslurm

# What it is told lies in files beside it; `asked` has what it was asked.
SCONTROL = """\
#!/bin/bash
cd "$(dirname "$0")"
echo "$*" >> asked
if [ -e silent ]; then exec sleep 600; fi
case "$2" in
  hostnames) tr , '\\n' <<< "$3" ;;
  job) cat job; kill -TERM $$ ;;
  config) echo 'KillWait                = 5 sec' ;;
  4711)
    cp ../state/train-*.json .
    kill -TERM "$PPID" $$
    [ ! -e refuses ] || { echo 'slurm error: "Not" accepted' >&2; exit 1; } ;;
  JobId=*) [ ! -e refuses_update ] || exit 1 ;;
esac
"""
RUNNING = "JobState=RUNNING Reason=None Restarts=0 PreemptTime=None ExcNodeList=(null) \n"
ENDING = "JobState=COMPLETING Reason={} Restarts={} PreemptTime={} ExcNodeList=(null) \n"
UNKNOWN = "slurm_load_jobs error: Invalid job id specified\n"
STARTED = "touch logs/train-1-node0.log\n"
STOPS = STARTED + "until [ -e state/stop-train-1.json ]; do sleep 0.02; done\n"
SAVES = """\
mkdir -p checkpoints/step-00000020
echo '{"step": 20, "saved": true}' > state/stopped-train-1.json
"""
ENDLESS = "while :; do sleep 0.1; done\n"
FOR_EVER = "trap '' TERM\n" + STARTED + ENDLESS


# The batch script, as it is run for the next attempt.
AGAIN = """\
[ ! -e fails ] || exit 7
cd "$SLURM_SUBMIT_DIR"
echo "$SLURM_RESTART_COUNT $SLURM_JOB_NODELIST ${OTHER:-none}" > given
export TRNSLURM_PHASE=train TRNSLURM_ATTEMPT=2 TRNSLURM_HOSTS=node-1,node-2 SLURM_JOB_NUM_NODES=2
export TRNSLURM_STANDBY
export TRNSLURM_RUN_DIR=$PWD PYTHONPATH=$PWD/code PATH=$PWD/bin:$PATH
[ -n "$TRNSLURM_STANDBY" ] || echo '{"job_id": "4711"}' > state/train-2.json
"""
# Started ahead: a step that waits for a line.
WAITS = """\
if [ -z "$TRNSLURM_STANDBY" ]; then
  touch logs/train-1-node0.log; mkdir -p checkpoints/step-00000020
  until [ -e waits ]; do sleep 0.02; done
  exit "$(cat code-1)"
fi
echo "srun: error: said while it waits" >&2
IFS=: read -r address port secret <<< "$TRNSLURM_BEATS"
exec 3<> "/dev/udp/$address/$port"
signs() { for node in $(cat alive); do echo -n "$secret 2 $node lives" >&3; done; }
while sleep 0.1; do signs; done < /dev/null &
echo "$TRNSLURM_RESUME $TRNSLURM_STANDBY" > logs/standby-train-2-node0.log
signs; for node in $(cat alive); do read -r -n 1 -u 3; done; touch waits
read -r line || { touch ended; kill %1; exit; }
echo "$line" > told; kill %1
echo "srun: error: said while it trains" >&2
"""


class Script:
    """What a batch script has made ready when it starts the program in its last line."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        for name in ("state", "logs", "checkpoints", "bin"):
            (bench.directory / name).mkdir()
        self.options = ["--nodes=2", "--max-crashes=3", "--requeue", "--exclude-hours=1"]
        self.retry_s = ["0", "0"]
        self.program = ["-m", "trnslurm.node.attempt"]
        self.command("scontrol", SCONTROL)
        self.says(RUNNING)
        self.step(STARTED)
        bench.environ |= {
            "PATH": f"{bench.directory}/bin:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2",
            "TRNSLURM_RUN_DIR": str(bench.directory), "TRNSLURM_HOSTS": "node-1,node-2",
        }  # fmt: skip

    def command(self, name: str, text: str) -> None:
        self.bench.script(f"bin/{name}", text)
        (self.bench.directory / "bin" / name).chmod(0o755)

    def with_change(self, change: str) -> None:
        """Run the program with another value in one of its modules."""
        lines = ["import sys", f"import {change}", "from trnslurm.node.attempt.program import main"]
        self.program = ["-c", "\n".join([*lines, "sys.exit(main(sys.argv[1:]))"])]

    def step(self, text: str) -> None:
        """What srun does, in the run directory."""
        self.command("srun", f"#!/bin/bash\n{text}")

    def says(self, job: str) -> None:
        """What the controller says of the job."""
        self.bench.script("bin/job", job)

    def touch(self, name: str) -> None:
        (self.bench.directory / name).touch()

    def start(
        self,
        attempt: int = 1,
        phase: str = "train",
        job: str = "4711",
        begin: str = "exec",
        restarts: int = 0,
    ) -> subprocess.Popen[str]:
        self.bench.script(
            f"state/{phase}-{attempt}.json",
            json.dumps({"job_id": job, "restarts": restarts, "started": "2026-01-01T00:00:00Z"}),
        )
        self.bench.environ |= {"TRNSLURM_PHASE": phase, "TRNSLURM_ATTEMPT": str(attempt)}
        words = [sys.executable, *self.program, *self.options, "--retry-s"]
        process: subprocess.Popen[str] = self.bench.start(
            "bash", "-c", f'{begin} "$@"', "bash", *words, *self.retry_s, "--", "srun", "-x"
        )
        return process

    def end(self, process: subprocess.Popen[str]) -> int:
        self.said = "".join(process.communicate(timeout=600))
        return process.returncode

    def run(self, **how: Any) -> int:
        return self.end(self.start(**how))

    def running(self, **how: Any) -> subprocess.Popen[str]:
        """Start, and wait until the step has begun."""
        process = self.start(**how)
        self.bench.await_files(f"logs/{how.get('phase', 'train')}-1-node0.log")
        return process

    def asked(self, word: str) -> list[str]:
        """The orders of a kind that the controller got."""
        lines = self.bench.read("bin/asked").splitlines()
        return [line for line in lines if line.startswith(word)]

    def state(self, attempt: int = 1, phase: str = "train") -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.bench.read(f"state/{phase}-{attempt}.json"))
        return state

    def ended(self, attempt: int = 1, phase: str = "train") -> tuple[str, str]:
        state = self.state(attempt, phase)
        return state["state"], state["reason"]


@pytest.fixture
def script(bench: Any) -> Script:
    return Script(bench)


def test_state_of_an_attempt_that_completes(script: Script) -> None:
    (script.bench.directory / "checkpoints/step-00000040").mkdir()
    (script.bench.directory / "checkpoints/step-00000050.tmp-1").mkdir()
    script.step('cp state/train-1.json before; echo "$@" > words\n' + STARTED)
    process = script.start()
    assert script.end(process) == 0, script.said
    before, after = json.loads(script.bench.read("before")), script.state()
    assert before == {
        "phase": "train", "attempt": 1, "job_id": "4711", "restarts": 0, "state": "RUNNING",
        "reason": "", "exit_code": None, "cause": "", "checkpoint": 40, "hosts": "node-1,node-2",
        "nodes": 2, "host": os.uname().nodename, "pid": process.pid,
        "started": "2026-01-01T00:00:00Z", "ended": None,
    }  # fmt: skip
    assert after["ended"] > after["started"]
    assert after == before | {"state": "COMPLETED", "exit_code": 0, "ended": after["ended"]}
    assert script.said.endswith("train attempt 1: COMPLETED\n")
    assert script.bench.has("state/heartbeat")
    assert script.bench.read("words") == "-x\n"


def test_a_step_that_srun_aborts_is_no_success(script: Script) -> None:
    """srun may exit with 0 then. A step that it aborted in an earlier try does not count."""
    aborts = "echo 'srun: Job step aborted: Waiting up to 7 seconds' >> logs/train-4711.log\n"
    script.step(STARTED + aborts)
    script.options = []
    assert script.run() == 1
    assert script.ended()[0] == "FAILED"
    script.step(f"{aborts}if [ -e again ]; then {STARTED}exit 0; fi\ntouch again; exit 1\n")
    (script.bench.directory / "logs/train-1-node0.log").unlink()
    assert script.run() == 1
    script.step(f"if [ -e more ]; then {STARTED}exit 0; fi\n{aborts}touch more; exit 1\n")
    (script.bench.directory / "logs/train-1-node0.log").unlink()
    assert script.run() == 0
    # What Slurm ends with the step is no failure of the training.
    (script.bench.directory / "logs/train-1-node0.log").unlink()
    script.step(STARTED + aborts)
    script.says(ENDING.format("None", 1, "None"))
    assert script.run() == 143
    assert script.ended()[0] == "REQUEUED"


def test_slurm_does_not_hold_an_expedited_job_that_failed(script: Script) -> None:
    script.options = ["--expedite"]
    script.step(STARTED + "exit 9\n")
    assert script.run() == 9
    assert script.asked("update") == ["update JobId=4711 Requeue=0"]


def test_heartbeat(script: Script) -> None:
    script.with_change("trnslurm.node.state as s; s.HEARTBEAT_S = 0.01")
    old = "touch -d 2001-01-01 state/heartbeat\n"
    fresh = 'until [ -n "$(find state/heartbeat -newermt 2002-01-01)" ]; do sleep 0.02; done\n'
    script.step(STARTED + old + fresh)
    assert script.run() == 0


def test_triage_that_fails_changes_nothing(script: Script) -> None:
    script.with_change("trnslurm.node.triage.diagnosis as f; f.diagnose = None")
    script.options = []
    script.step(STARTED + "exit 9\n")
    assert script.run() == 9
    assert "TypeError" in script.said
    assert script.ended() == ("FAILED", "exit code 9 while running on node-1,node-2")


def raises(error: str, code: int = 1, node: int = 1) -> str:
    """A step that leaves a traceback in the log of a node, the second one by default."""
    lines = ["Traceback (most recent call last):", '  File "code/jobs/x/train.py", line 3, in f']
    said = "".join(f"{line}\n" for line in [*lines, "    g()", error])
    return f'cat > "logs/train-$TRNSLURM_ATTEMPT-node{node}.log" <<"EOF"\n{said}EOF\nexit {code}\n'


def test_what_would_come_again_is_not_tried_again(script: Script) -> None:
    """The cause wins, not what srun's TERM left of the other node, of which srun gives the code."""
    script.bench.script("metrics.jsonl", '{"attempt": 0, "step": 20}\n')  # it tells its steps
    script.step(raises("KeyError: 'lr'", code=143))
    assert script.run() == 143
    assert script.ended() == ("FAILED", "KeyError: 'lr' at train.py, line 3")
    assert script.state()["cause"] == "error" and script.asked("requeue") == []
    assert ", which would end every attempt\n" in script.said


def test_the_process_that_holds_a_taken_port_is_named(script: Script) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script.step(raises(f"DistNetworkError: no socket. port: {port}, name: EADDRINUSE", node=0))
        assert script.run() == 1
    held = f"port {port} of node-1 is held by {Path('/proc/self/comm').read_text().strip()} "
    held += f"(process {os.getpid()}"
    assert held in script.ended()[1] and f"\ncause: {held}" in script.said


def test_crashes_are_counted(script: Script) -> None:
    """The job is requeued until it has crashed too often, and is then not even begun."""
    script.step('touch "logs/train-$TRNSLURM_ATTEMPT-node1.log"; echo x >> tries; exit 9\n')
    assert [script.run(attempt=n) for n in (1, 2, 3)] == [9, 9, 9]
    why = "without a new checkpoint: exit code 9 while running on node-1,node-2"
    assert [script.ended(n) for n in (1, 2, 3)] == [
        ("REQUEUED", f"crash 1 of 3 {why}"),
        ("REQUEUED", f"crash 2 of 3 {why}"),
        ("FAILED", f"given up after 3 crashes in a row {why}"),
    ]
    assert script.asked("requeue") == ["requeue 4711"] * 2
    assert "triage: train attempt 3: no failure was found; read logs" in script.said
    assert script.run(attempt=4) == 1
    assert script.ended(4) == ("FAILED", f"given up after 3 crashes in a row {why}")
    assert f"error: given up after 3 crashes in a row {why}" in script.said
    assert script.bench.read("tries") == "x\n" * 3


def test_requeued_is_written_before_slurm_is_asked(script: Script) -> None:
    """KILL may follow. TERM, which the requeue sends to all of the job, is waited out."""
    script.step(STARTED + "exit 9\n")
    assert script.run() == 9
    assert json.loads(script.bench.read("bin/train-1.json"))["state"] == "REQUEUED"
    assert script.ended()[0] == "REQUEUED"
    assert script.state()["cause"] == "crash"


@pytest.mark.parametrize(
    ("job", "word", "why"),
    [
        (RUNNING, "FAILED", '; it could not be requeued: slurm error: "Not" accepted'),
        (UNKNOWN, "FAILED", "; it could not be requeued: Slurm no longer has a record of the job"),
        (
            RUNNING + " WorkDir=/runs/of-another \n",
            "FAILED",
            "Slurm no longer has a record of the job",
        ),
        # Slurm would start a job again that is being cancelled.
        (ENDING.format("None", 0, "None"), "CANCELLED", "cancelled as it ended"),
        (ENDING.format("None", 1, "None"), "REQUEUED", ""),  # Slurm did so in the meantime
    ],
)
def test_requeue_that_cannot_be(script: Script, job: str, word: str, why: str) -> None:
    script.says(job)
    script.touch("bin/refuses")
    script.step(STARTED + "exit 9\n")
    assert script.run() == 9
    assert script.ended()[0] == word
    assert script.ended()[1].endswith(why)
    assert len(script.asked("requeue")) == (3 if "accepted" in why else 0)  # it may be busy


@pytest.mark.parametrize("ours", [True, False])
def test_a_task_of_an_array_is_requeued_alone(script: Script, ours: bool) -> None:
    """The array is submitted from a directory that has a link for each task."""
    place = script.bench.directory / "array-1"
    place.mkdir()
    (place / "3").symlink_to(script.bench.directory if ours else "of-another")
    script.says(f"{RUNNING} WorkDir={place} StdErr={place}/x \n")
    script.step(STARTED + "exit 9\n")
    assert script.run(job="77_3") == 9
    assert script.ended()[0] == ("REQUEUED" if ours else "FAILED")
    assert script.asked("requeue") == (["requeue 77_3"] if ours else [])


def started_again(script: Script, *, options: str = "", before: str = "") -> None:
    """Let the batch script be run once more after a crash."""
    environ = script.bench.environ
    code = environ.get("PYTHONPATH") or str(Path(trnslurm.__file__).parents[1])
    command = f"{sys.executable} -m trnslurm.node.attempt --requeue {options} -- srun -y"
    text = AGAIN.replace("$PWD/code", code) + f"{before}\nexec {command}\n"
    script.bench.script("again.sh", text)
    environ |= {"SLURM_JOB_NODELIST": "node-[1-2]", "OTHER": "x", "MASTER_ADDR": "127.0.0.1"}
    script.with_change("trnslurm.node.attempt.machine as m; m.LOOK_S = m.AHEAD_AFTER_S = 0.01")
    script.options += [f"--script={script.bench.directory}/again.sh"]


def test_a_crash_starts_again_in_the_allocation(script: Script) -> None:
    started_again(script, before="sleep 9 > /dev/null 2>&1 &")
    script.step(STARTED + 'echo "$*" >> words\n[ "$TRNSLURM_ATTEMPT" = 2 ] && exit\nexit 9\n')
    assert script.run() == 0, script.said
    assert script.ended()[0] == "RESTARTED" and "crash 1 of 3" in script.ended()[1]
    assert script.ended(2) == ("COMPLETED", "")
    assert script.bench.read("words") == "-x\n-y\n"
    assert script.bench.read("given") == "0 node-[1-2] none\n"
    assert script.asked("requeue") == []


def test_the_second_crash_in_a_row_is_requeued(script: Script) -> None:
    started_again(script)
    script.step("touch logs/train-$TRNSLURM_ATTEMPT-node0.log\nexit 9\n")
    assert script.run() == 9, script.said
    assert [script.ended(n)[0] for n in (1, 2)] == ["RESTARTED", "REQUEUED"]
    assert len(script.asked("requeue")) == 1


def test_a_script_that_cannot_start_again(script: Script) -> None:
    started_again(script)
    script.touch("fails")
    script.step(STARTED + "exit 9\n")
    assert script.run() == 7


def test_what_starts_again_is_ended(script: Script) -> None:
    """TERM while the batch script runs ends the next attempt."""
    started_again(script, before="touch asked; until [ -e goes ]; do sleep 0.02; done")
    script.step(STARTED + "exit 9\n")
    process = script.start()
    script.bench.await_files("asked")
    process.send_signal(signal.SIGTERM)
    script.touch("goes")
    assert script.end(process) == 143, script.said
    assert script.ended(2)[0] == "CANCELLED"


@pytest.fixture
def ahead(script: Script) -> Script:
    """A script whose next attempt is started ahead, once it trains, and has a heartbeat."""
    started_again(script)
    script.options.append("--standby")
    script.bench.script("code-1", "9")
    script.bench.script("alive", "0 1")
    script.step(WAITS)
    return script


def test_a_crash_is_followed_by_what_was_started_ahead(ahead: Script) -> None:
    """Its log gets the attempt's name, and it is told where to begin."""
    assert ahead.run() == 0, ahead.said
    assert [ahead.ended(n)[0] for n in (1, 2)] == ["RESTARTED", "COMPLETED"]
    newest = ahead.bench.directory / "checkpoints/step-00000020"
    assert json.loads(ahead.bench.read("told")) == {"TRNSLURM_RESUME": str(newest)}
    assert ahead.bench.read("logs/train-2-node0.log") == "@resume@ 2\n"
    assert ahead.state(2)["checkpoint"] == 20
    assert "said while it trains" in ahead.said and "said while it waits" not in ahead.said


def test_a_frozen_node_is_not_used_though_it_was_started_ahead(ahead: Script) -> None:
    """It has no heartbeat, and would never train."""
    ahead.bench.script("alive", "0")
    ahead.step(f"if [ -e ended ]; then touch again; exit; fi\n{WAITS}")
    assert ahead.run() == 0, ahead.said
    assert [ahead.ended(n)[0] for n in (1, 2)] == ["RESTARTED", "COMPLETED"]
    assert ahead.bench.has("again") and not ahead.bench.has("told")


@pytest.mark.parametrize(("code", "ends"), [("0", 0), ("9", 143)])
def test_what_was_started_ahead_is_ended(ahead: Script, code: str, ends: int) -> None:
    """Once the training is complete, or another job has taken the next attempt."""
    ahead.bench.script("code-1", code)
    taken = "" if code == "0" else '[ -n "$TRNSLURM_STANDBY" ] || touch state/train-2.json\n'
    ahead.step(taken + WAITS)
    assert ahead.run() == ends, ahead.said
    ahead.bench.await_files("ended")
    assert not list((ahead.bench.directory / "logs").glob("standby-*"))


STUCK = {"node": 1, "host": "x", "line": "stuck"}
SLOW = {"notices": [{"what": "compute", "node": 1, "host": "x", "text": "slow"}]}


@pytest.mark.parametrize(
    ("file", "content", "options", "left_out"),
    [
        ("stuck", STUCK, [], ["node-2,node-8,node-9"]),
        ("pace", SLOW, ["--leave-out-slow"], ["node-2,node-8,node-9"]),
        ("pace", SLOW, [], []),
    ],
)
def test_time_limit_is_near(
    script: Script, file: str, content: Any, options: list[str], left_out: list[str]
) -> None:
    """The workers save and say so; a bad node is left out of what follows."""
    script.says(RUNNING.replace("(null)", "node-8,node-9"))
    script.options += options
    found = f"echo '{json.dumps(content)}' > state/{file}-train-1.json\n"
    script.step(STOPS + SAVES + found)
    process = script.running()
    process.send_signal(signal.SIGUSR1)
    assert script.end(process) == 143, script.said
    assert script.ended() == ("REQUEUED", "time limit; saved step 20")
    assert json.loads(script.bench.read("state/stop-train-1.json"))["cause"] == "time limit"
    updates = [f"update JobId=4711 ExcNodeList={nodes}" for nodes in left_out]
    assert script.asked("update") == updates


def test_nodes_that_cannot_be_left_out(script: Script) -> None:
    script.touch("bin/refuses_update")
    stuck = """echo '{"node": 1, "host": "x", "line": "stuck"}' > state/stuck-train-1.json\n"""
    script.step(STARTED + stuck + "exit 9\n")
    assert script.run() == 9
    assert script.ended()[0] == "REQUEUED"
    assert "warning: node-2 will not be left out of the next attempt" in script.said


def test_cancel_asks_to_save(script: Script) -> None:
    script.step(STOPS + SAVES)
    process = script.running()
    script.touch("state/cancelled.json")
    process.send_signal(signal.SIGUSR1)
    assert script.end(process) == 143
    assert script.ended() == ("CANCELLED", "saved step 20")
    assert json.loads(script.bench.read("state/stop-train-1.json"))["cause"] == "cancelled"
    assert script.asked("requeue") == []


@pytest.mark.parametrize(
    ("job", "word", "requeued"),
    [
        (ENDING.format("None", 0, "None"), "CANCELLED", 0),
        (ENDING.format("TimeLimit", 0, "None"), "TIMEOUT", 0),
        (ENDING.format("None", 1, "None"), "REQUEUED", 0),
        (ENDING.format("None", 0, "2026-01-01T00:00"), "REQUEUED", 1),
        ("", "CANCELLED", 0),
        (UNKNOWN, "FAILED", 0),
        (RUNNING + "WorkDir=/runs/of-another ", "FAILED", 0),
    ],
)
def test_term_is_told_apart(script: Script, job: str, word: str, requeued: int) -> None:
    """srun and the workers have had theirs; another one would make torchrun leave its workers."""
    script.says(job)
    script.step("trap 'touch termed' TERM\n" + STOPS + "exit 7\n")
    process = script.running()
    process.send_signal(signal.SIGTERM)
    assert script.end(process) == (7 if word == "FAILED" else 143), script.said
    assert script.ended()[0] == word
    assert len(script.asked("requeue")) == requeued
    assert json.loads(script.bench.read("state/stop-train-1.json"))["cause"] == "terminated"
    assert not script.bench.has("termed")


def test_a_silent_controller(script: Script) -> None:
    """CANCELLED is written at once; nobody waits longer than three quarters of KillWait."""
    script.step(FOR_EVER)
    process = script.running()
    script.touch("bin/silent")
    process.send_signal(signal.SIGTERM)
    script.bench.await_true(lambda: script.ended()[0] == "CANCELLED", "it is written")
    assert process.poll() is None
    assert script.end(process) == 143
    assert script.ended() == ("CANCELLED", "not by trnslurm cancel")
    script.bench.await_none_alive()


def test_workers_that_do_not_end_are_left_to_slurm(script: Script) -> None:
    script.says(ENDING.format("None", 0, "2026-01-01T00:00"))
    script.step(FOR_EVER)
    process = script.running()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    assert script.end(process) == 143
    assert script.ended() == ("REQUEUED", "preempted")


@pytest.mark.parametrize(("restarts", "word"), [(1, "REQUEUED"), (0, "CANCELLED")])
def test_srun_says_0_when_slurm_ends_the_job(script: Script, restarts: int, word: str) -> None:
    """As when it gives up a node under it."""
    script.says(ENDING.format("None", restarts, "None"))
    assert script.run() == 143
    assert script.ended()[0] == word


def test_a_preemption_of_which_only_the_step_is_told(script: Script) -> None:
    """So it is with a GraceTime; the job runs until that is over."""
    script.says(RUNNING.replace("PreemptTime=None", "PreemptTime=2026-01-01T00:00"))
    script.step("exit 1")
    assert script.run() == 143
    assert script.ended() == ("REQUEUED", "preempted")
    assert script.asked("requeue") == ["requeue 4711"]


def test_srun_that_started_nothing_is_tried_again(script: Script) -> None:
    """It gives up on a busy controller too soon; once a node has a log, the code is the job's."""
    script.step("echo x >> tries\nexit 1\n")
    assert script.run() == 1
    assert script.bench.read("tries") == "x\n" * 3
    script.step("echo x >> tries\n[ $(wc -l < tries) -gt 5 ] || exit 1\n" + STARTED)
    assert script.run(attempt=2) == 0, script.said
    assert script.bench.read("tries") == "x\n" * 6


def test_trained_to_the_end_before(script: Script) -> None:
    """Another node has gone on, and has started the job again, so that it can complete."""
    script.step(STARTED)
    assert script.run() == 0, script.said
    script.step("exit 9\n")
    script.says(RUNNING.replace("Restarts=0", "Restarts=1"))
    assert script.run(attempt=2, restarts=1) == 0, script.said
    assert script.ended(2)[:2] == ("COMPLETED", "the previous attempt completed the training")


def test_term_between_two_tries(script: Script) -> None:
    script.retry_s = ["600"]
    script.says(ENDING.format("None", 0, "None"))
    script.step("echo x >> tries\nexit 1\n")
    process = script.start()
    script.bench.await_files("tries")
    process.send_signal(signal.SIGTERM)
    assert script.end(process) == 143
    assert script.ended()[0] == "CANCELLED"
    assert script.bench.read("tries") == "x\n"


def test_ending_that_cannot_be_decided(script: Script) -> None:
    """Then the exit code must do, and a training that may not be whole has not completed."""
    damaged = "touch state/stop-train-1.json; echo '{\"saved\": true}' > state/stopped-train-1.json"
    script.step(f"{STARTED}{damaged}\nexit 9\n")
    assert script.run() == 9
    assert script.ended() == ("FAILED", "exit code 9 while running on node-1,node-2")
    script.step(f"{STARTED}{damaged}\n")
    assert script.run() == 1
    assert script.ended() == ("FAILED", "exit code 1 while deciding how it ended")


def test_an_attempt_that_was_taken_over(script: Script) -> None:
    script.step(STARTED + "echo '{}' > state/train-2.json\nexit 9\n")
    script.run()
    assert script.ended() == ("FAILED", "attempt 2 has taken over")
    assert script.asked("requeue") == []


@pytest.mark.parametrize("asked", [1, 2])
def test_a_first_node_that_was_cut_off(script: Script, asked: int) -> None:
    """Another node has gone on before this one judges, or once it reaches Slurm for a requeue."""
    begun = json.dumps({"job_id": "4711", "restarts": 0, "host": "node-2"})
    told = f"[ $(grep -c 'show job' asked) -lt {asked} ] || echo '{begun}' > ../state/train-2.json"
    script.command("scontrol", SCONTROL.replace("  job) ", f"  job) {told}; "))
    script.step(STARTED + "exit 9\n")
    script.bench.script("train.sbatch", "#SBATCH --no-kill\n")
    script.options.append("--spares=1")
    script.bench.environ |= {
        "TRNSLURM_ALLOCATION": "node-1,node-2,node-3", "TRNSLURM_PYTHON": sys.executable,
        "SLURM_JOB_NUM_NODES": "3", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    process = script.start()
    assert process.stderr and any(
        "on node-2, which continues the job" in line for line in process.stderr
    )
    process.kill()
    script.end(process)
    assert script.asked("requeue") == script.asked("update") == []


def test_cancelled_run_does_not_come_back(script: Script) -> None:
    script.touch("state/cancelled.json")
    script.step("touch started\n")
    assert script.run() == 1
    assert script.ended() == ("CANCELLED", "cancelled before it started")
    assert "remove state/cancelled.json to run it anyway" in script.said
    assert not script.bench.has("started")


def test_other_allocation_is_refused(script: Script) -> None:
    script.bench.environ["SLURM_JOB_NUM_NODES"] = "3"
    script.step("touch started\n")
    assert script.run() == 2
    assert "this script is for 2 nodes, but the allocation has 3: render it again" in script.said
    assert script.ended() == ("FAILED", "exit code 2 while checking the allocation")
    assert not script.bench.has("started")


def test_state_that_cannot_be_written_changes_no_exit_code(script: Script) -> None:
    script.step(STARTED + "mv state gone\n")
    assert script.run() == 0
    assert "state not written" in script.said


@pytest.mark.parametrize("phase", ["precompile", "prepare"])
def test_other_phases_are_ended_at_once(script: Script, phase: str) -> None:
    """They save nothing, and only a training is requeued by its own program."""
    script.options = ["--nodes=2"]
    script.says(ENDING.format("None", 0, "2026-01-01T00:00"))
    script.step(f"trap 'exit 5' TERM\ntouch logs/{phase}-1-node0.log\n{ENDLESS}")
    process = script.running(phase=phase)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    assert script.end(process) == 143
    assert script.ended(phase=phase) == ("PREEMPTED", "preempted")
    assert not script.bench.has(f"state/stop-{phase}-1.json")
    assert "cause" not in script.state(phase=phase)


# -- compiled graphs


@pytest.fixture
def compiling(script: Script) -> Script:
    script.options = ["--graphs"]
    script.bench.script("graphs.json", '{"micro_batch": 1}')
    script.bench.script("plan.json", '{"nodes": 1}')
    script.bench.environ |= {
        "TRNSLURM_CACHE": str(script.bench.directory / "cache"), "TRNSLURM_DEVICE": "neuron",
        "TRNSLURM_CACHE_LAYOUT": "shared", "TRNSLURM_CACHE_TRUST": "",
        "NEURON_COMPILE_CACHE_URL": str(script.bench.directory / "cache"),
    }  # fmt: skip
    return script


COMPILES = """\
echo "$TRNSLURM_GRAPH_KEY" >> keys
cat > state/graphs-$TRNSLURM_ATTEMPT-node0.json << END
{"node": 0, "host": "a", "found": 1, "compiled": 1, "failed": 0, "seconds": 1.0, "graphs": ["g"],
 "settled": ["g"], "files": [], "problem": ""}
END
touch logs/precompile-$TRNSLURM_ATTEMPT-node0.log
"""


def test_graphs_are_committed_and_then_warm(compiling: Script) -> None:
    compiling.step(COMPILES)
    assert compiling.run(phase="precompile") == 0, compiling.said
    key = compiling.bench.read("keys").strip()
    assert f"graphs of key {key}: not compiled" in compiling.said
    assert f"graphs of key {key}: 1 compiled" in compiling.said
    assert compiling.bench.has(f"cache/trnslurm/{key}/manifest.json")
    assert compiling.run(phase="precompile", attempt=2) == 0
    assert f"graphs of key {key}: compiled by " in compiling.said
    assert compiling.ended(2, "precompile") == ("COMPLETED", "")
    assert len(compiling.bench.read("keys").splitlines()) == 1  # nothing was started


def test_graphs_that_are_missing(compiling: Script) -> None:
    compiling.step("touch logs/precompile-1-node0.log\n")
    assert compiling.run(phase="precompile") == 1
    assert compiling.ended(phase="precompile") == (
        "FAILED", "exit code 1 while verifying the graphs",
    )  # fmt: skip
    assert "error: node 0 has not written its result" in compiling.said


def test_graphs_whose_ingredients_are_damaged(compiling: Script) -> None:
    compiling.bench.script("graphs.json", "{")
    assert compiling.run() == 1
    assert compiling.ended() == ("FAILED", "exit code 1 while reading the key of the graphs")
    assert "error: " in compiling.said and "Traceback" not in compiling.said


def test_term_while_graphs_are_read(compiling: Script) -> None:
    """The key needs the version of a package whose file nobody ever writes."""
    package = compiling.bench.directory / "slow" / "torch_neuronx-1.dist-info"
    package.mkdir(parents=True)
    os.mkfifo(package / "METADATA")
    path = compiling.bench.environ["PYTHONPATH"]
    compiling.bench.environ["PYTHONPATH"] = f"{package.parent}:{path}"
    process = compiling.start(phase="precompile")
    compiling.bench.await_files("bin/asked")
    process.send_signal(signal.SIGTERM)
    assert compiling.end(process) == 143, compiling.said
    assert compiling.ended(phase="precompile")[0] == "CANCELLED"


# -- on this machine


@pytest.mark.parametrize(
    ("saves", "ended"), [("", ("CANCELLED", "")), (SAVES, ("STOPPED", "saved step 20"))]
)
def test_term_on_this_machine_is_handed_on(
    script: Script, saves: str, ended: tuple[str, str]
) -> None:
    script.options = []
    script.command("scontrol", '#!/bin/bash\ntouch "$(dirname "$0")/asked"\n')
    script.step(f"end() {{\n{saves}exit 143\n}}\ntrap end TERM\n{STARTED}{ENDLESS}")
    process = script.running(job="local-7")
    process.send_signal(signal.SIGINT)
    assert script.end(process) == 143
    assert script.ended() == ended
    assert not script.bench.has("bin/asked")


# -- processes and signals


@pytest.mark.parametrize("job", ["4711", "local-7"])
def test_step_ends_with_a_program_that_is_killed(script: Script, job: str) -> None:
    script.options = []
    script.step(STARTED + ENDLESS)
    process = script.running(job=job)
    process.kill()
    process.wait(600)
    script.bench.await_none_alive()
    assert script.ended() == ("RUNNING", "")


def test_signals_that_were_ignored_before(script: Script) -> None:
    """As under nohup, or for a job in the background; the step has the usual ones again."""
    script.step("trap 'touch heard' USR2\nkill -USR2 $$\n" + STOPS + SAVES)
    process = script.running(begin="trap '' TERM INT HUP USR1 USR2 CHLD; exec")
    script.bench.await_files("heard")
    process.send_signal(signal.SIGUSR1)
    assert script.end(process) == 143
    assert script.ended() == ("REQUEUED", "time limit; saved step 20")


def test_under_nohup_a_closed_terminal_ends_nothing(script: Script) -> None:
    script.options = []
    script.step(STARTED + "until [ -e go ]; do sleep 0.05; done\n")
    process = script.running(begin="trap '' HUP; exec", job="local-7")
    process.send_signal(signal.SIGHUP)
    (script.bench.directory / "go").touch()
    assert script.end(process) == 0
    assert script.ended() == ("COMPLETED", "")


def test_signal_before_the_step_starts(script: Script) -> None:
    script.step("touch started\n")
    script.command("scontrol", '#!/bin/bash\necho x >> "${0%/*}/asked"\nkill -TERM "$PPID"\n')
    assert script.run() == 143
    assert script.ended()[0] == "CANCELLED"
    assert not script.bench.has("started")


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "no command"), (["--", "true"], "TRNSLURM_HOSTS is not set"), (["--no"], "--no")],
)
def test_usage(words: list[str], said: str, bench: Any) -> None:
    done = bench.run("attempt", *words)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
