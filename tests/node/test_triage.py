"""triage: who failed first in an attempt, by its records and all logs, and what the lines mean."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trnslurm.contract.files import write_json
from trnslurm.node.triage.causes import (
    Cause,
    Context,
    all_causes,
    cause_of,
    general_meaning,
    last_meaning,
    may_match,
    named,
    parser,
    words_of,
)
from trnslurm.node.triage.diagnosis import diagnose, nothing_found
from trnslurm.node.triage.finding import Finding
from trnslurm.node.triage.mend import SUBMIT, rest_of, short
from trnslurm.node.triage.patterns import without_atomic
from trnslurm.node.triage.words import time_in
from trnslurm.records.run import RunDir

from .measure_triage import CORPUS, cases_in

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests/node/triage_logs"
KNOWN = ROOT / "trnslurm/node/triage/known"
FAILED = {"state": "FAILED", "exit_code": 1, "reason": "exit code 1 while running on node-1,node-2"}
PEER_GONE = (
    "[rank{0}]: Traceback (most recent call last):\n"
    '[rank{0}]:   File "train.py", line 7, in f\n'
    "[rank{0}]: RuntimeError: [gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:41702\n"
)
REPORT = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_10:00:{second:02}
  host      : localhost
  rank      : {rank} (local_rank: 0)
  exitcode  : {code} (pid: 100)
  error_file: <N/A>
  traceback : {said}
"""
NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


@pytest.fixture
def run(make_run) -> RunDir:
    """A run of two nodes whose training has failed."""
    return make_run(states={"train": [FAILED]}, phases=("train",), jobs={"train": "1002"})


def log(run: RunDir, node: int, text: str, attempt: int = 1) -> None:
    run.node_log("train", attempt, node).write_text(text)


def report(rank: int, code: int, second: int = 0, said: str = NO_TRACEBACK) -> str:
    return REPORT.format(rank=rank, code=code, second=second, said=said)


def record(run: RunDir, rank: int, when: float, error: str, attempt: int = 1) -> None:
    trace = f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\n{error}\n'
    write_json(
        run.state / f"failed-train-{attempt}-rank{rank}.json",
        {"time": when, "rank": rank, "node": rank // 2, "host": f"node-{rank // 2 + 1}", "pid": 1,
         "step": 3, "error": error, "traceback": trace},
    )  # fmt: skip


def found(run: RunDir) -> Finding:
    finding = diagnose(run.path, "train", 1)
    assert finding is not None
    return finding


# -- known causes


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach "
            "https://huggingface.co/api/models/acme/m-7b/revision/main: offline mode is enabled.",
            "model acme/m-7b|hf download acme/m-7b (HF_HOME",
        ),
        (
            "ConnectionError: Couldn't reach 'acme/d' on the Hub (LocalEntryNotFoundError)",
            'dataset acme/d|load_dataset("acme/d")',
        ),
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
            "model acme/option|hf download acme/option (HF_HOME",
        ),
        (
            "DistNetworkError: The server socket has failed to listen on any local network "
            "address. port: 29511, useIpv6: false, code: -98, name: EADDRINUSE",
            "the port 29511 is taken on this node|",
        ),
        (
            "RuntimeError: The server socket has failed to bind to [::]:29512 (errno: 98 - "
            "Address already in use).",
            "the port 29512 is taken on this node|",
        ),
        (
            "OSError: [Errno 98] Address already in use",
            "the port is taken on this node: the master port|",
        ),
    ],
)
def test_what_the_line_names_is_named(run, lines: str, words: str) -> None:
    (run.path / "node.sh").write_text("python train.py --model_name_or_path acme/option --lr 1\n")
    log(
        run,
        0,
        f'Traceback (most recent call last):\n  File "t.py", line 3, in f\n    g()\n{lines}\n',
    )
    cause, fix = words.split("|")
    assert cause in found(run).cause and fix in found(run).fix


def faults_of(cause: Cause) -> Iterator[str]:
    """Yield what is wrong with an entry, and with what its pattern matches."""
    context = Context(frames=cause.beside, before=cause.beside, log=cause.beside)

    def meaning(line: str, context: Context) -> Cause | None:
        if cause.kind == "general":
            return general_meaning(line, context.frames)
        if cause.kind == "last":
            return last_meaning([line])[0]
        return cause_of([line], context)

    found = meaning(cause.example, context)
    if found is not cause:
        yield f"its example means {found.name if found else 'nothing'}"
    if cause.conditions and meaning(cause.example, Context()) is cause:
        yield "its example alone means it"
    yield from (f"near: {line}" for line in cause.near if meaning(line, context) is cause)
    if cause.kind not in ("cause", "effect", "harmless", "general", "last"):
        yield f"kind: {cause.kind}"
    sources = ("neuron", "slurm", "node", "container", "python", "script", "trnslurm")
    if cause.source not in sources:
        yield f"source: {cause.source}"
    if cause.kind not in ("general", "last") and not may_match(cause.example.lower()):
        yield "no word of its example is looked for"
    yield from (f"too long: {said}" for said in (cause.cause, cause.fix) if len(said) > 180)
    if cause.kind != "harmless" and cause.mend not in ("submit", "resume", "either", "passes"):
        yield f"mend: {cause.mend}"
    if cause.kind != "harmless" and short(cause.fix).endswith(" …"):
        yield "status cuts the first part of its fix"


@pytest.mark.parametrize("file", sorted(KNOWN.glob("*.toml")), ids=lambda file: file.stem)
def test_patterns_match_their_examples_and_nothing_near(file: Path) -> None:
    names = re.findall(r'^name = "([^"]+)"$', file.read_text(encoding="utf-8"), re.MULTILINE)
    causes = {cause.name: cause for cause in all_causes()}
    found = {name: faults for name in names if (faults := [*faults_of(causes[name])])}
    assert names and not found, "\n".join(f"{name}: {said}" for name, said in found.items())


def test_every_line_that_a_pattern_matches_has_one_of_its_words() -> None:
    lines = [cause.example for cause in all_causes()]
    lines += [case["telling"] for case in cases_in(CORPUS / "learn")]
    for cause in all_causes():
        matched = [line.lower() for line in lines if cause.pattern.search(line)]
        assert not cause.words or all(any(word in x for word in cause.words) for x in matched)
    assert words_of("(?i)CUDA error: [a-z]+|no (such|free) device") == {
        *("cuda error: ", " device")
    }
    assert words_of(r"\d+ (lost|x)") == words_of(r"[a-z]*") == frozenset()


def test_older_pythons_read_the_patterns_with_the_same_result() -> None:
    assert without_atomic(r"a\(?>[)*+]*+(?>b|(c+))*d{2}+") == (
        r"a\(?>(?:(?=(?P<_0>[)*+]*))(?P=_0))(?:(?=(?P<_1>b|(c+)))(?P=_1))*(?:(?=(?P<_2>d{2}))(?P=_2))"
    )
    others = [case["telling"] for case in cases_in(CORPUS / "learn")]
    rewritten = 0
    for cause in all_causes():
        around = (part.pattern for part in (cause.frame, cause.before, cause.log) if part)
        for text in (cause.text, *around):
            now, older = re.compile(text), without_atomic(text)
            tree = str(parser().parse(older))
            assert "ATOMIC_GROUP" not in tree and "POSSESSIVE_REPEAT" not in tree, text
            if older == text:
                continue
            rewritten += 1
            for line in (cause.example, cause.beside, *cause.near, *others):
                found, again = now.search(line), re.search(older, line)
                assert (found and found.span()) == (again and again.span()), (text, line)
                assert not found or found.groupdict().items() <= again.groupdict().items()
    assert rewritten >= 20


def test_names_are_unique_and_in_their_own_lines() -> None:
    names = [cause.name for cause in all_causes()]
    assert len(set(names)) == len(names)
    files = "".join(file.read_text(encoding="utf-8") for file in KNOWN.glob("*.toml"))
    assert len(re.findall(r'^name = "([^"]+)"$', files, re.MULTILINE)) == len(names)


# -- who failed first


STARTED = "2026-11-30T00:28:55Z train: node 1 of 2 on node-2, master 127.0.0.1:2710\n"
GLOO_FAILED = (
    '[rank0]: Traceback (most recent call last):\n[rank0]:   File "/w/train.py", line 6, in f\n'
    "[rank0]:     dist.all_reduce(t)\n[rank0]: RuntimeError: [/w/gloo/transport/tcp/{}\n"
    "trnslurm: 2026-11-30T00:29:05.360Z rank 0 (local rank 0, a) failed: exit code 1 of PID 1\n"
)
ENDED_WELL = (
    "trnslurm: 2026-11-30T00:29:04.000Z rank 1 (local rank 0, node-2) ended with exit code 0"
)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            GLOO_FAILED.format("pair.cc:547] Connection closed by peer [127.0.0.1]:2959"),
            f"{STARTED}{ENDED_WELL} while others ran\n",
            "likely: rank 1 ended by itself, with exit code 0, while others ran: they waited for "
            "it in a collective",
        ),
        (
            GLOO_FAILED.format("unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation"),
            f"{STARTED}loading the dataset\ntrnslurm: the launcher got signal: 15 (SIGTERM)\n",
            "  node 1 was still running; its log ends with: loading the dataset",
        ),
        (
            "step 3 loss nan\nstopping\ntrnslurm: 2026-11-30T00:29:05.360Z rank 0 (local rank 0, "
            "node-1) failed: exit code 1 of PID 1\n",
            STARTED,
            "likely: the loss is NaN",
        ),
        (
            "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: DataLoader worker "
            "(pid 17) is killed by signal: Killed. \n[rank0]: Traceback (most recent call last):\n"
            '[rank0]:   File "/usr/lib/python3.11/multiprocessing/resource_sharer.py", line 87, in '
            "get_connection\n[rank0]:     c = Client(address)\n"
            "[rank0]: ConnectionResetError: [Errno 104] Connection reset by peer\n",
            STARTED,
            "  RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed.",
        ),
    ],
    ids=["a rank ended with 0", "a rank still loads", "NaN, then exit", "a loader's worker killed"],
)
def test_who_held_the_others_up(run, first: str, second: str, says: str) -> None:
    run.plan_file.write_text('{"workers_per_node": 1}')
    log(run, 0, first)
    log(run, 1, second)
    assert any(line.startswith(says) for line in found(run).report()), found(run).report()


@pytest.mark.parametrize(
    ("case", "name", "last_line"),
    [
        ("raise", "token-index", "ValueError: tokens 51 is beyond the vocabulary of 50"),
        ("kill", "signal-kill", "Signal 9 (SIGKILL) received by PID 13165"),
        ("exit", "", "it ended with exit code 7, without a traceback"),
        ("segfault", "signal-segv", "Signal 11 (SIGSEGV) received by PID 13621"),
    ],
)
@pytest.mark.parametrize("cut", ["whole", "without reports"])
def test_real_failures(run, case: str, name: str, last_line: str, cut: str) -> None:
    """Rank 3 on node 1, though others have tracebacks too, and torchrun may name another one."""
    for file in (LOGS / case).glob("*.log"):
        text = file.read_text()
        log(run, int(file.stem[-1]), text if cut == "whole" else text.partition("=====")[0])
    run.plan_file.write_text('{"workers_per_node": 2}')
    finding = found(run)
    assert (finding.rank, finding.node, finding.host) == (3, 1, "node-2")
    assert (finding.name, finding.kind) == (name, "cause")
    assert finding.lines[-1].partition(" by PID")[0] == last_line.partition(" by PID")[0]
    assert finding.evidence == "logs/train-1-node1.log"
    assert finding.when or (case, cut) == ("raise", "without reports")


def test_traceback_is_trimmed_to_the_jobs_own_frames(run) -> None:
    shutil.copy(LOGS / "raise/train-1-node1.log", run.node_log("train", 1, 1))
    assert found(run).report() == [
        "triage: train attempt 1: rank 3 on node 1 (node-2) failed first at 2026-11-22 00:44:51",
        '    File "/home/ada/jobs/toy/train.py", line 11, in <module>',
        "      inner(x)",
        '    File "/home/ada/jobs/toy/train.py", line 10, in inner',
        '      raise ValueError("tokens 51 is beyond the vocabulary of 50")',
        "  ValueError: tokens 51 is beyond the vocabulary of 50",
        f"likely: {named('token-index').cause}",
        f"fix: {named('token-index').fix}",
        "see: logs/train-1-node1.log",
    ]


def test_records_tell_the_order_within_a_second(run) -> None:
    record(run, 2, 1000.2, "RuntimeError: Connection reset by peer")
    record(run, 3, 1000.7, "ValueError: later")
    record(
        run, 1, 1000.5, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    finding = found(run)
    assert (finding.rank, finding.when, finding.name) == (1, 1000.5, "gpu-memory")
    assert finding.evidence == "state/failed-train-1-rank1.json"
    assert len(finding.report()) <= 12


def test_killed_worker_goes_before_the_survivors_records(run) -> None:
    record(run, 0, time_in("2026-11-22 10:00:00.1"), "RuntimeError: Connection closed by peer")
    log(run, 1, report(2, -9, said="Signal 9 (SIGKILL) received by PID 100"))
    assert (found(run).rank, found(run).name) == (2, "signal-kill")


def test_what_the_kernel_did_tells_why_a_worker_was_killed(run) -> None:
    """A known use of memory goes before its count, but not before its word that it did nothing."""
    killed = report(2, -9, said="Signal 9 (SIGKILL) received by PID 100")
    loading = "Loading checkpoint shards:  40%|████      | 2/5\n"
    counted = "trnslurm: rank 2 was killed (KILL); since the launcher's start the kernel has ended "
    one, none = (
        f"{counted}1 process of this node for lack",
        f"{counted}no process of this node for lack",
    )
    free = " of memory (9 s before, 41.7 of 63.2 GiB were free)\n"
    for told, name in (
        (killed + one, "kernel-killed"),
        (killed + none, "killed-by-hand"),
        (loading + killed + one, "killed-loading"),
        (loading + killed + none, "killed-by-hand"),
    ):
        log(run, 1, told + free)
        assert found(run).name == name
    assert found(run).line == (
        "rank 2 on node-2: the worker was killed by signal 9 (SIGKILL) from outside, not by the "
        "kernel's OOM killer (9 s before, 41.7 of 63.2 GiB were free)"
    )


def test_a_likely_cause_goes_before_consequences_unless_it_warns(run) -> None:
    log(run, 0, PEER_GONE.format(0) + report(0, 1))
    failed = "NCCL WARN Call to ibv_modify_qp failed with error Invalid argument\n"
    log(run, 1, failed + PEER_GONE.format(1))
    assert (found(run).name, found(run).certain) == ("nccl-ib-setup", False)
    unknown = "[W socket.cpp:7] [c10d] getaddrinfo failed: Name or service not known\n"
    log(run, 1, unknown + PEER_GONE.format(1))
    assert found(run).kind == "effect"


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        ("98, in _init_group\n    exp_avg = zeros(p)", "gpu-memory-optimizer"),
        (
            '161, in step\n    loss = closure()\n  File "/x/a.py", line 31, in f\n    y = net(x)',
            "gpu-memory",
        ),
    ],
)
def test_what_an_optimizers_closure_does_is_not_its_own(frames: str, name: str) -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    context = Context(frames=f'  File "/env/torch/optim/adamw.py", line {frames}\n')
    assert cause_of([line], context) == named(name)


def test_the_cause_may_be_in_a_later_line_of_a_message(run) -> None:
    last = "Error while creating shared memory segment /dev/shm/nccl-a1 (size 9637888)"
    log(run, 0, PEER_GONE.format(0) + report(0, 1))
    lines = ["Traceback (most recent call last):", '  File "train.py", line 7, in <module>',
             "torch.distributed.DistBackendError: NCCL error, unhandled system error",
             "ncclSystemError: System call failed", "Last error:", last]  # fmt: skip
    log(run, 1, "\n".join(f"[rank1]: {line}" for line in lines))
    finding = found(run)
    assert (finding.rank, finding.name, finding.lines[-1]) == (1, "nccl-shm", last)


def test_a_loader_workers_own_exception_is_found(run) -> None:
    log(run, 0, "Traceback (most recent call last):\n  File \"train.py\", line 7, in <module>\n"
        "UnidentifiedImageError: Caught UnidentifiedImageError in DataLoader worker process 2.\n"
        "Original Traceback (most recent call last):\n  File \"data.py\", line 3, in read\n"
        "KeyError: 'input_ids'\n")  # fmt: skip
    assert found(run).name == ""
    assert found(run).lines[-1] == "KeyError: 'input_ids'"


def test_the_last_words_of_a_worker_that_ends_itself_are_told(run) -> None:
    """As those of sys.exit("no data"), which are no words of an error."""
    own = "2026-11-28T04:03:27Z train: node 0 of 1 on a, master 127.0.0.1:21060\n"
    died = "E1128 04:03:29.397000 26380 torch/distributed/elastic/multiprocessing/api.py:882] "
    died += "failed (exitcode: 3) local_rank: 0 (pid: 26403) of binary: python\n"
    banners = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer "
    banners += (
        "ranks is : 1\n[W1129 21:28:14.123656170 socket.cpp:209] [c10d] The hostname is unknown.\n"
    )
    said = f"{own}preflight: 1 node fits in 0.0 s\n{banners}no data\n{banners}{died}"
    log(run, 0, said + report(0, 3))
    assert found(run).lines == ("no data", "it ended with exit code 3, without a traceback")
    assert found(run).cause.startswith("unknown: ")
    assert found(run).brief.endswith("; the last line of the log: no data")
    log(run, 0, own + died + report(0, 3))
    assert len(found(run).lines) == 1 and "last words" not in found(run).brief


def test_a_traceback_that_python_ignored_is_no_failure(run) -> None:
    ignored = "Traceback (most recent call last):\nTypeError: at exit\n"
    log(run, 0, f"Exception ignored in: <function f>\n{ignored}" + report(0, 3))
    assert found(run).lines[-1] == "it ended with exit code 3, without a traceback"
    assert found(run).lines[0] == "TypeError: at exit"  # an error-like line, shown but not named
    assert found(run).report()[-3].startswith("unknown: ")


@pytest.mark.parametrize(
    "line",
    [
        "[2023-08-30 08:14:13,220] [ERROR] [launch.py:321:sigkill_handler] ['python', 'x.py', "
        "'--local_rank=1', '--deepspeed'] exits with return code = -9",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 1 "
        "(pid: 178) of binary: /venv/bin/python",
    ],
    ids=["DeepSpeed", "torch 1"],
)
def test_a_workers_end_in_other_launchers_words(run, line: str) -> None:
    run.plan_file.write_text('{"workers_per_node": 2}')
    log(run, 1, f"{line}\n")
    assert (found(run).rank, found(run).name) == (3, "signal-kill")
    assert found(run).report()[2].startswith("likely: the worker was killed")


def test_the_watchdogs_fraction_is_not_after_torchruns_whole_second(run) -> None:
    second = time_in("2026-11-22 10:00:07")
    write_json(
        run.state / "stuck-train-1.json",
        {"time": second + 0.6, "rank": 3, "node": 1, "host": "node-2", "line": "rank 3 stands"},
    )
    log(run, 0, report(0, 7, second=7))
    assert (found(run).rank, found(run).name) == (3, "stuck")


def test_weak_evidence_names_other_causes(run) -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    log(run, 0, f"{line}\n" + report(0, -9, said="Signal 9 (SIGKILL) received by PID 100"))
    assert found(run).report()[-2] == f"or: out of GPU memory ({line})"


def test_an_earlier_line_of_the_log_may_explain_an_unknown_error(run) -> None:
    lost = "NVRM: Xid (PCI:0000:10:1c): 79, pid=1234, GPU has fallen off the bus."
    raised = '  File "gpt.py", line 3, in build\n    index.sizes\nacme.OddError: 17\n'
    log(run, 0, f"{lost}\nTraceback (most recent call last):\n{raised}")
    found = diagnose(run.path, "train", 1)
    assert found and (found.name, found.certain) == ("gpu-lost", False)
    assert lost in found.lines


def test_a_kill_at_the_end_does_not_explain_an_exception(run) -> None:
    """Slurm kills workers that outlive the first failure."""
    record(run, 1, 1000.5, "Traceback (most recent call last):\n  File \"train.py\", line 29, in "
           "main\n    raise KeyError(name)\nKeyError: 'told to fail'\n")  # fmt: skip
    (run.logs / "train-1002.log").write_text("srun: error: node-1: task 0: Killed\n")
    assert found(run).lines[-1] == "KeyError: 'told to fail'"
    assert "train.py, line 29" in found(run).cause


@pytest.mark.parametrize(
    "said",
    [
        "trnslurm: 2026-11-29T11:12:44.902Z rank 0 (local rank 0, node-1) failed: exit code 1 of 7",
        "train.sh: line 44:  4102 Killed                  python train.py",
        "munmap_chunk(): invalid pointer",
    ],
)
def test_what_others_say_next_is_no_part_of_a_message(run, said: str) -> None:
    log(run, 0, 'Traceback (most recent call last):\n  File "x.py", line 2, in <module>\n'
        f"    a[key]\nKeyError: 'lr'\n{said}\n")  # fmt: skip
    finding = found(run)
    assert finding.lines[-1] == "KeyError: 'lr'"
    assert finding.name not in ("shell-killed", "heap")


def test_a_command_that_the_batch_script_survived_is_not_the_cause(run) -> None:
    batch = run.logs / "train-1002.log"
    failed = "rm: cannot remove '/scratch/old': Permission denied"
    odd = "prun: error: the tasks could not be laid out"
    batch.write_text(f"{failed}\n{odd}\n")
    finding = found(run)
    assert (finding.name, finding.lines[-1]) == ("", odd)
    batch.write_text(f"{failed}\n")
    assert (found(run).name, found(run).lines) == ("permission", (failed,))


def test_what_nccl_warns_of_first_is_the_cause_of_the_rest(run) -> None:
    setup = "node-1:7:9 [0] misc/ibvwrap.cc:9 NCCL WARN Call to ibv_modify_qp failed with error X\n"
    cuda = "node-1:7:9 [0] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
    names = []
    for lines in (setup, cuda, setup + cuda, cuda + setup):
        log(run, 0, lines)
        names.append(found(run).name)
    assert names[0] != names[1]
    assert names[2:] == names[:2]


def test_a_warning_explains_no_error_that_speaks_of_something_else(run) -> None:
    warned = "[W socket.cpp:697] [c10d] The client socket has failed to connect to [node-1]:29500"
    warned += " (errno: 111 - Connection refused).\n"
    raised = 'Traceback (most recent call last):\n  File "x.py", line 2, in f\nacme.OddError: '
    log(run, 0, f"{warned}{raised}no such shape\n")
    assert found(run).name == ""
    log(run, 0, f"{warned}{raised}the store is gone\n")
    assert found(run).name == "connection-refused"


def test_the_first_task_that_srun_saw_die_goes_before_consequences(run) -> None:
    """Its node's log just stops; what srun ends after it is killed as well."""
    killed = "srun: error: node-2: task 1: Killed"
    ends = "srun: launch/slurm: _step_signal: Terminating StepId=1002.1"
    last = "srun: error: node-1: task 0: Exited with exit code 1"
    log(run, 0, PEER_GONE.format(0) + report(0, 1, second=1))
    log(run, 1, "[Gloo] Rank 1 is connected to 1 peer ranks.\n")
    (run.logs / "train-1002.log").write_text("\n".join([killed, ends, last]) + "\n")
    finding = found(run)
    assert (finding.name, finding.host, finding.lines[0]) == ("task-killed", "node-2", killed)
    assert finding.brief.startswith("node-2: ")
    (run.logs / "train-1002.log").write_text("\n".join([last, ends, killed]) + "\n")
    assert found(run).name != "task-killed"


def test_out_of_memory_killer_explains_the_kill(run) -> None:
    oom = "slurmstepd: error: Detected 1 oom_kill event in StepId=1002.0. Some of the step tasks"
    log(run, 0, PEER_GONE.format(0) + report(0, 1, second=1))
    log(run, 1, f"{oom}\n" + report(1, -9, said="Signal 9 (SIGKILL) received by PID 100"))
    finding = found(run)
    assert (finding.rank, finding.name) == (1, "oom-kill")
    assert finding.lines[-1] == oom


def test_error_line_is_of_the_worker_that_torchrun_names(run) -> None:
    line = "error: /data/x.bin: no such file: set data: in the recipe"
    log(run, 0, PEER_GONE.format(0))
    log(run, 1, f"{line}\n{report(2, 1)}")
    assert (found(run).rank, found(run).lines) == (2, (line,))


def test_of_workers_that_fail_at_once_the_one_that_says_why_is_named(run) -> None:
    trace = '[rank2]: Traceback (most recent call last):\n[rank2]:   File "x.py", line 1, in f\n'
    reports = [report(rank, 1) for rank in (0, 1, 2)]
    log(run, 0, "\n".join([f"{trace}[rank2]: TypeError: bad value", *reports]))
    assert (found(run).rank, found(run).lines[-1]) == (2, "TypeError: bad value")
    # A minute later, it is another failure.
    reports[2] = report(2, 1, second=50)
    log(run, 0, "\n".join([f"{trace}[rank2]: TypeError: bad value", *reports]))
    assert found(run).rank == 0


def test_abort_after_a_lost_peer_is_an_effect(run) -> None:
    log(run, 0, "terminate called: NCCL communicator was aborted\n" + report(0, -6, second=0))
    log(run, 1, report(1, -11, second=1, said="Signal 11 (SIGSEGV) received by PID 100"))
    assert (found(run).rank, found(run).name) == (1, "signal-segv")


def test_a_crash_goes_before_a_plain_exit_at_the_same_time(run) -> None:
    log(run, 0, report(0, 1))
    log(run, 1, report(2, -11, said="Signal 11 (SIGSEGV) received by PID 100"))
    assert (found(run).rank, found(run).name) == (2, "signal-segv")
    log(run, 1, report(2, -11, second=30, said="Signal 11 (SIGSEGV) received by PID 100"))
    assert found(run).rank == 0


def test_abort_of_its_own_names_its_rank(run) -> None:
    """What torchrun says at the end, and what the peers on its node say, excuses nobody.

    Why native code aborts, it says itself before, or nobody knows.
    """
    peers = PEER_GONE.format(1) + "torch.distributed.elastic.ChildFailedError:\n"
    log(run, 0, peers + report(0, -6, said="Signal 6 (SIGABRT) received by PID 100"))
    finding = found(run)
    assert (finding.rank, finding.name, finding.kind) == (0, "signal-abort", "effect")
    assert finding.brief.startswith("rank 0 on node-1: native code aborted the worker (SIGABRT)")


def test_an_abort_is_told_by_the_line_with_its_own_rank(run) -> None:
    """An exception without a rank that was caught before is no reason for a watchdog's abort."""
    timeout = "[Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=67"
    abort = report(5, -6, said="Signal 6 (SIGABRT) received by PID 100")
    log(run, 0, f"{CAUGHT}saving\n[rank5]:[E1027 16:08:49.3 Process.cpp:6] {timeout}\n{abort}")
    assert (found(run).rank, found(run).kind) == (5, "effect")


def test_a_command_that_failed_before_the_workers_started_is_not_blamed(run) -> None:
    copy = 'rsync: [sender] link_stat "/data/extra" failed: No such file or directory (2)\n'
    log(run, 0, copy)
    assert found(run).name == "copy-failed"
    torchrun = "I1214 06:33:13.8 44 torch/distributed/launcher/api.py:194] Starting operator\n"
    lost = "[c10d] The client socket has timed out after 60000ms while trying to connect to (n, 1)."
    log(run, 0, f"{copy}{torchrun}[E1214 06:34:14.8 socket.cpp:1011] {lost}\n")
    assert found(run).name == "connection-refused"


def test_survived_traceback_is_not_blamed(run) -> None:
    survived = 'Traceback (most recent call last):\n  File "x.py", line 1\nOSError: no metadata\n'
    log(run, 0, survived + PEER_GONE.format(0) + report(0, 1))
    log(run, 1, report(1, -9, second=5, said="Signal 9 (SIGKILL) received by PID 100"))
    assert found(run).rank == 1


CAUGHT = (
    'Traceback (most recent call last):\n  File "/x/attn.py", line 2, in <module>\n'
    "    import flash_attn\nModuleNotFoundError: No module named 'flash_attn'\n"
)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (
            "WARNING: optional kernel not used:",
            "INFO using scaled_dot_product_attention",
            "data-empty",
        ),
        ("ERROR: kernel skipped", "2026-11-22 10:00:01 INFO 8 layers", "data-empty"),
        (
            "no kernel",
            "[rank0]: Traceback (most recent call last):",
            "data-empty",
        ),  # it got further
        ("WARNING: slow disk", "", "package-missing"),
        (
            "WARNING: slow disk",
            "[2026-11-22] [INFO] [launch.py:315:sigkill_handler]",
            "package-missing",
        ),
    ],
)
def test_a_caught_exception_is_not_the_end(run, before: str, after: str, name: str) -> None:
    empty = ('[rank0]: Traceback (most recent call last):\n[rank0]:   File "t.py", line 1, in f\n'
             "[rank0]: ValueError: num_samples should be a positive integer value, but got "
             "num_samples=0\n")  # fmt: skip
    end = empty if name == "data-empty" else ""
    log(run, 0, f"{before}\n{CAUGHT}{after}\n{end}")
    assert found(run).name == name


def test_an_exception_that_a_handler_printed_goes_after_all_others(run) -> None:
    """An exception that ends a process begins in its script, not in a module that it imports."""
    printed = CAUGHT.replace("/x/attn.py", "/x/attn/__init__.py")
    log(run, 0, printed)
    assert (found(run).name, found(run).lines[-1]) == ("package-missing", printed.splitlines()[-1])
    log(run, 0, f"{printed}[2025-10-15 10:30:21,464] INFO attn: using SDPA\n{PEER_GONE.format(0)}")
    assert found(run).name == "peer-gone"
    # Another node's line shows the cause, without an INFO line after the exception here.
    log(run, 0, f"{printed}loading\n")
    log(run, 1, "node-2:5:5 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found\n")
    assert found(run).name == "nccl-interface"
    # The program says that it goes on, and ends with a plain exit.
    log(run, 0, f"{CAUGHT}attention is disabled, using SDPA instead\n{report(1, 1)}")
    log(run, 1, "")
    assert (found(run).name, found(run).certain) == ("package-missing", False)
    # The same frames inside another exception's message were not printed by a handler.
    ended = 'Traceback (most recent call last):\n  File "x.py", line 2, in <module>\nValueError: \n'
    log(run, 0, f"{ended}\n-- Process 2 terminated with the following error:\n{printed}")
    assert found(run).name == "package-missing"


STEPS = "".join(f"step {n} loss {9 / n:.3f}\n" for n in (1, 2, 3, 4))
DIED = (
    "trnslurm: 2026-12-01T11:43:49.718Z rank 1 (local rank {}, node-{}) failed: exit code 7 of "
    "PID 9\n"
)


@pytest.mark.parametrize("said", ["No module named 'flash_attn'\n", CAUGHT])
def test_an_error_after_which_other_ranks_made_steps_did_not_end_one(run, said: str) -> None:
    log(run, 1, f"{said}loading\n{DIED.format(0, 2)}")
    assert found(run).name == "package-missing"
    log(run, 0, f"{said}{STEPS}{PEER_GONE.format(0)}")
    finding = found(run)
    assert (finding.rank, finding.name, finding.others) == (1, "", ())
    assert finding.brief.endswith("exit code 7, without a traceback; the last line of the log: "
                                  "loading")  # fmt: skip


def test_an_error_before_all_ranks_were_connected_ended_none(run) -> None:
    (run.path / "plan.json").write_text('{"workers_per_node": 1}')
    connected = "[Gloo] Rank 1 is connected to {} peer ranks. Expected number of connected peer "
    said = f"No module named 'flash_attn'\n{connected}\n{DIED.format(0, 2)}"
    log(run, 1, said.format(0))  # a group of its own
    assert found(run).name == "package-missing"
    log(run, 1, said.format(1))
    assert found(run).name == ""
    # Python exits with 1 after an exception, so @record would show nothing.
    assert found(run).fix == "find where the program exits with 7 (sys.exit, os._exit)"


def test_advice_does_not_name_a_version_of_the_users_script(run) -> None:
    error = "[rank0]: RuntimeError: cannot call numpy() on it. Use detach().numpy() instead.\n"
    log(run, 0, PEER_GONE.format(0).rsplit("[rank0]", 1)[0] + error)
    assert found(run).fix == "do what the line suggests at train.py, line 7"


def test_an_error_that_a_rank_survived_is_no_other_cause(run) -> None:
    own = PEER_GONE.format(1).rsplit("[rank1]", 1)[0] + "[rank1]: ValueError: label 17\n"
    log(run, 1, f"{CAUGHT}loading\n{own}")
    assert (found(run).lines[-1], found(run).others) == ("ValueError: label 17", ())


def test_the_last_words_of_a_rank_are_not_those_of_another(run) -> None:
    lost = PEER_GONE.format(0) * 40  # longer than the end of a log that is read
    log(run, 0, f"{STEPS}shard 3 has the wrong checksum\n{lost}{DIED.format(1, 1)}")
    finding = found(run)
    assert finding.rank == 1
    assert finding.brief.endswith("the last line of the log: shard 3 has the wrong checksum")


def test_ended_by_term_is_never_first(run) -> None:
    log(run, 0, report(0, -15, second=0, said="Signal 15 (SIGTERM) received by PID 1"))
    assert found(run).kind == "effect"
    log(run, 1, report(1, 3, second=9))
    assert (found(run).rank, found(run).lines[-1]) == (
        1, "it ended with exit code 3, without a traceback",
    )  # fmt: skip


def test_hardware_error_before_the_exception_is_the_cause(run) -> None:
    stamp = "2026-Nov-22 09:59:58.0593 15042:15042 ERROR  TDRV:exec"
    log(run, 0, "suspected hang in collectives operation 0\n" + PEER_GONE.format(0))
    log(run, 1, f"{stamp} Uncorrectable HBM error\n[rank1]: RuntimeError: no\n" + report(1, 1, 1))
    finding = found(run)
    assert (finding.name, finding.node) == ("hbm-error", 1)


def test_node_failure_in_the_batch_log_goes_before_consequences(run) -> None:
    log(run, 0, PEER_GONE.format(0) + report(0, 1, second=9))
    line = "slurmstepd: error: *** JOB 1002 ON node-1 CANCELLED AT 2026-11-22T10:00:01 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"  # noqa: E501
    (run.logs / "train-1002.log").write_text(f"{line}\n")
    assert (found(run).name, found(run).rank) == ("node-failed", None)
    assert found(run).report()[0] == "triage: train attempt 1: from the job's log"
    # srun names the node; another one only says that it is ended.
    (run.logs / "train-1002.log").write_text(f"srun: error: Node failure on node-2\n{line}\n")
    assert (found(run).node, found(run).host) == (1, "node-2")
    assert found(run).brief.startswith("node-2: a node failed")


def test_only_consequences_are_said_to_be_that(run) -> None:
    log(run, 0, PEER_GONE.format(0))
    finding = found(run)
    words = "only consequences were found; the first: rank 0 on node 0 (node-1)"
    assert words in finding.report()[0]
    assert words not in "\n".join(finding.report(told=finding.line))


def test_a_script_is_not_to_be_upgraded_by_pip(run) -> None:
    packages = "/env/lib/python3.11/site-packages"
    said = f"ImportError: cannot import name 'old' from 'lib' ({packages}/lib/__init__.py)"
    frame = '  File "{}", line 3, in <module>\n    from lib import old\n'
    for file, begins in (
        ("/proj/train.py", "install an older lib for which"),
        (f"{packages}/other/a.py", "pip install -U other, or install an older lib for which"),
    ):
        log(run, 0, f"Traceback (most recent call last):\n{frame.format(file)}{said}\n")
        assert found(run).fix.startswith(begins)
    for file, told in (("/proj/train.py", False), (f"{packages}/other/a.py", True)):
        said = f'  File "{file}", line 3, in f\n    os.environ["ARGS"]\nKeyError: \'ARGS\''
        log(run, 0, f"Traceback (most recent call last):\n{said}\n")
        assert ("or update other" in found(run).fix) == told
        assert "update train.py" not in found(run).fix


def test_harmless_lines_are_never_named(run) -> None:
    log(run, 0, "2026-Jan-03 21:00:33 1:1 ERROR  NRT:nrt_close  Unexpected runtime state: X\n")
    assert diagnose(run.path, "train", 1) is None


def test_a_file_that_was_not_copied_is_connected_with_gitignore(run) -> None:
    run.code.mkdir()
    write_json(run.project_file, {"links": {}, "left_out": [".root", "data"]})
    error = "FileNotFoundError: [Errno 2] No such file or directory: '{}'"
    for path in ("data/train.bin", f"/fsx/{run.name}/work/data/train.bin", "./.root"):
        record(run, 0, 1.0, error.format(path))
        name = "data" if "data" in path else ".root"
        why = ".gitignore lists it" if name == "data" else "it is hidden"
        assert found(run).cause == f"{name} was not copied with the project, because {why}"
        assert found(run).options == ("--set", f"links=[{name}]")
        assert (found(run).again, found(run).mend) == (True, "submit")
    record(run, 0, 1.0, error.format("database.bin"))
    assert "copied" not in found(run).cause
    # A directory to write into.
    record(run, 0, 1.0, "RuntimeError: Parent directory data does not exist.")
    assert found(run).fix.startswith("create it in the script (os.makedirs), or submit again with")
    # With others of its directory.
    write_json(run.project_file, {"links": {}, "left_out": ["a/x/1.bin", "a/x/2.bin", ".root"]})
    record(run, 0, 1.0, error.format("a/x/1.bin"))
    assert found(run).options == ("--set", "links=[a/x]")
    # In a library's own words.
    record(run, 0, 1.0, "FileNotFoundError: No root directory. Indicators: ['.root']")
    assert found(run).options == ("--set", "links=[.root]")


def test_a_script_that_is_to_start_in_its_own_directory(run) -> None:
    for name in ("mini/data/input.txt", "other/data/input.txt", "other/more.txt"):
        file = run.code / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    work = f"/fsx/{run.name}/work"
    frame = f'Traceback (most recent call last):\n  File "{work}/mini/main.py", line 3, in main\n'
    error = "FileNotFoundError: [Errno 2] No such file or directory: '{}'\n"
    for path in ("data/input.txt", f"{work}/data/input.txt"):
        log(run, 0, f"{frame}    open(path)\n{error.format(path)}")
        assert found(run).cause == (
            "data/input.txt is in the project's mini/, but the script starts in the directory above"
        )
        assert found(run).fix == "submit in mini/ (cd mini), or give the path mini/data/input.txt"
    for path in ("more.txt", "/data/input.txt"):
        log(run, 0, f"{frame}    open(path)\n{error.format(path)}")
        assert found(run).cause.startswith(f"the file {path} does not exist on this node")


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("ValueError: ProcessGroupNCCL is only supported with GPUs", "gloo instead of nccl"),
        ("ValueError: Your setup doesn't support bf16/gpu.", "--bf16 False"),
    ],
)
def test_a_gpu_that_a_run_on_cpus_never_asked_for(run, error: str, fix: str) -> None:
    record(run, 0, 1.0, error)
    assert "CPU" not in found(run).cause
    for device, told in (("cuda", False), ("cpu", True)):
        write_json(run.plan_file, {"device": device})
        assert ("this run computes on CPUs" in found(run).cause) == told
        assert (fix in found(run).fix) == told


def test_carets_are_no_code(run) -> None:
    log(
        run,
        0,
        'Traceback (most recent call last):\n  File "/p/train.py", line 9, in f\n'
        "    assert steps % workers == 0\n           ^^^^^^^^^^^^^^^^^^^^\nAssertionError\n",
    )
    assert "(train.py, line 9): assert steps % workers == 0" in found(run).cause


@pytest.mark.parametrize(
    ("module", "name"),
    [("own", "own"), ("own.a", "own"), ("pkg.part", "src/pkg"), ("one", "one.py"), ("owner", "")],
)
def test_a_module_that_was_not_copied_is_not_to_be_installed(run, module: str, name: str) -> None:
    run.code.mkdir()
    write_json(run.project_file, {"links": {}, "left_out": ["own", "one.py", "src/pkg"]})
    record(run, 0, 1.0, f"ModuleNotFoundError: No module named '{module}'")
    assert found(run).options == (("--set", f"links=[{name}]") if name else ())


@pytest.mark.parametrize(
    ("module", "meant"),
    [
        ("torchh", "torch"), ("nunpy", "numpy"), ("tranformers", "transformers"), ("torchx.a", ""),
        ("sklaern", "sklearn"), ("widhts", "widths"), ("argprase", "argparse"), ("mdoel", "model"),
        ("einops", ""), ("typer", ""), ("pickle5", ""), ("apex", ""), ("torchaudio", ""),
        ("tensorboardX", ""),
    ],
)  # fmt: skip
def test_a_misspelt_module_is_not_to_be_installed(run, module: str, meant: str) -> None:
    for file in ("widths/__init__.py", "model.py"):
        (run.code / "project" / file).parent.mkdir(parents=True, exist_ok=True)
        (run.code / "project" / file).touch()
    write_json(run.project_file, {"links": {}, "left_out": []})
    record(run, 0, 1.0, f"ModuleNotFoundError: No module named '{module}'")
    told = found(run)
    said = f"there is no module {module.partition('.')[0]}: did you mean {meant}?"
    assert (told.cause == said) == bool(meant)
    assert told.mend == SUBMIT or not meant
    assert told.fix.startswith("correct the name in the script, and submit again; ") == bool(meant)


def test_the_python_that_lacks_a_package_is_named(run) -> None:
    record(run, 0, 1.0, "ModuleNotFoundError: No module named 'einops'")
    script = run.path / "train.sbatch"
    for text, python in (
        ("export TRNSLURM_PYTHON=/env/bin/python\n", "/env/bin/python"),
        ("TRNSLURM_DEFAULT_PYTHON=/env/bin/python\n", "/env/bin/python"),  # without Slurm
        ("export TRNSLURM_PYTHON='$x'\n", "python"),
        ("export TRNSLURM_PYTHON=/env/bin/python\n# preparing the container\n", "python"),
    ):
        script.write_text(text)
        assert found(run).fix == f"{python} -m pip install einops"


def test_what_submit_warned_of_stands_beside_the_cause(run) -> None:
    record(run, 0, 1.0, "RuntimeError: No CUDA GPUs are available")
    assert "submit warned" not in "\n".join(found(run).report())
    run.write_record(replace(run.record(), warned=("train.py, line 3: no GPU", "no timm")))
    assert found(run).report()[-2:] == [
        "submit warned: train.py, line 3: no GPU; no timm",
        "see: state/failed-train-1-rank0.json",
    ]
    record(run, 0, 1.0, "\n".join(f'  File "a{n}.py", line 1, in f\n    x' for n in range(9)))
    assert len(found(run).report()) <= 12


def test_an_empty_list_may_come_of_what_was_not_copied(run) -> None:
    run.code.mkdir()
    for left_out, begins in (
        (["tokens"], "check whether the script needs tokens, which "),
        ([], ""),
    ):
        write_json(run.project_file, {"links": {}, "left_out": left_out})
        record(run, 0, 1.0, "IndexError: list index out of range")
        assert found(run).fix.startswith(begins or "print the list")


@pytest.mark.parametrize(
    ("error", "file", "text"),
    [
        ("AssertionError: no shards", "train.py", 'files = glob("tokens/*.bin")'),
        ("IndexError: list index out of range", "train.py", "files = Path('./tokens').glob('*')"),
        ("FileNotFoundError: nothing at tokens/", "train.py", 'FOLDER = "tokens"'),
        ("no files found", "node.sh", "  train.py --data=tokens/*.bin\n"),
    ],
)
def test_a_script_that_found_nothing_names_what_was_not_copied(
    run, error: str, file: str, text: str
) -> None:
    run.code.mkdir()
    write_json(run.project_file, {"links": {}, "left_out": [".root", "out", "tokens"]})
    work = run.path / "work"
    work.mkdir()
    frame = f'Traceback (most recent call last):\n  File "{work}/train.py", line 3, in f\n    x\n'
    log(run, 0, f"{frame}{error}\n" if "Error" in error else f"{error}\n{report(0, 1)}")
    assert not found(run).options
    script = (run.path if file == "node.sh" else work) / file
    for other in (text.replace("tokens", "token"), 'save("out/x.pt", data)', 'data["tokens"]'):
        script.write_text(other)
        assert not found(run).options
    script.write_text(text)
    why = "tokens, which the script names, was not copied with the project, because .gitignore"
    assert found(run).cause.startswith(why) and why in found(run).brief
    assert (found(run).options, found(run).certain) == (("--set", "links=[tokens]"), False)


def test_a_download_without_internet_is_no_problem_of_the_rendezvous(run) -> None:
    """The data may be there, but not copied: then the script tries to download them again."""
    run.code.mkdir()
    unknown = "<urlopen error [Errno -2] Name or service not known>"
    for left_out, begins in (
        (
            [".root", "data"],
            "check whether the script needs data, .root, which .gitignore excluded from the copy",
        ),
        ([], "download it on a machine with internet access"),
    ):
        write_json(run.project_file, {"links": {}, "left_out": left_out})
        record(run, 0, 1.0, f"RuntimeError: Error downloading images.gz:\n{unknown}")
        assert found(run).name == "download-unreachable"
        assert found(run).fix.startswith(begins)


CRASH = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f8f2b7fe740 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/a.py", line 3 in b
  File "/home/me/train.py", line 6 in crash
Signal 11 (SIGSEGV) received by PID 41
"""


def test_a_crash_whose_stack_is_there_is_placed(run) -> None:
    log(run, 0, CRASH)
    assert found(run).cause.endswith(", at train.py, line 6")
    assert "PYTHONFAULTHANDLER" not in found(run).fix
    other = (
        '\n\nThread 0x00007f8f2b7fe641 (most recent call first):\n  File "/x.py", line 1 in f\n\n'
    )
    log(run, 0, CRASH.replace("\n\n", other, 1))
    assert found(run).cause.endswith(", at train.py, line 6")
    log(run, 0, CRASH.splitlines()[-1])
    assert found(run).fix.startswith("set env.PYTHONFAULTHANDLER=1 to see where; ")


@pytest.mark.parametrize(
    ("times", "refused", "name"),
    [(4, "", "master-unresolved"), (1, "", "other-master"), (4, "yes", "other-master")],
)
def test_a_masters_name_that_does_not_resolve_is_named(run, times, refused, name) -> None:
    """A name with an IPv4 address only has such lines, too, before a connection is tried."""
    unknown = "[W socket.cpp:767] [c10d] The IPv6 network addresses of (head, 29511) cannot be "
    unknown += "retrieved (gai error: -2 - Name or service not known).\n"
    tried = "[W socket.cpp:7] [c10d] The client socket has failed to connect to [head]:29511 (errno"
    tried += ": 111 - Connection refused).\n"
    log(
        run,
        0,
        "2026-01-01T00:00:00Z train: node 0 of 2 on node-1, master 10.0.0.1:20579\n"
        + unknown * times
        + (tried if refused else "")
        + 'Traceback (most recent call last):\n  File "train.py", line 2, in f\n    init()\n'
        "torch.distributed.DistNetworkError: The client socket has timed out after 20000ms while "
        "trying to connect to (head, 29511).\n",
    )
    assert found(run).name == name and " head, " in found(run).cause


@pytest.mark.parametrize("tag", ["", "0: "])
def test_a_loaders_error_in_a_package_is_placed_in_the_script(run, tag: str) -> None:
    """Its worker's own traceback, inside the message, has no line of the script."""
    said = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 11, in <module>\n'
        "    for x in loader:\nRuntimeError: Caught RuntimeError in DataLoader worker process 1.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/env/lib/site-packages/torch/utils/data/_utils/collate.py", line 272, in f\n'
        "    return torch.stack(batch, 0, out=out)\n"
        "RuntimeError: stack expects each tensor to be equal size, but got [3] at entry 0\n"
    )
    log(run, 0, "".join(f"{tag}{line}\n" for line in said.splitlines()))
    assert "at entry 0 at train.py, line 11" in found(run).brief
    assert found(run).name == "shapes-batch"


WAIT = (
    "[rank{0}]:[E ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=175, OpType={1}, NumelIn={2}, NumelOut=1, Timeout(ms)=600000) ran "
    "for 600022 milliseconds before timing out.\n"
)


def test_ranks_that_wait_in_different_collectives_have_diverged(run) -> None:
    log(run, 0, WAIT.format(0, "_ALLGATHER_BASE", 512) + WAIT.format(1, "_ALLGATHER_BASE", 512))
    assert found(run).name == "gather-timeout"
    log(run, 1, WAIT.format(2, "ALLREDUCE", 1))
    assert found(run).name == "ranks-diverged"
    assert [line[:7] for line in found(run).lines[-2:]] == ["[rank0]", "[rank2]"]
    log(run, 1, WAIT.format(2, "_ALLGATHER_BASE", 1024))
    assert found(run).name == "ranks-diverged"


def test_the_rank_that_does_not_wait_is_named(run) -> None:
    run.plan_file.write_text('{"workers_per_node": 4}')
    for node, ranks in enumerate(((0, 1, 2, 3), (4, 5, 7))):
        log(run, node, "".join(WAIT.format(rank, "_ALLGATHER_BASE", 512) for rank in ranks))
    assert found(run).lines[-1] == "all ranks wait in a collective except 6"
    log(run, 0, WAIT.format(0, "_ALLGATHER_BASE", 512))
    assert "all ranks wait" not in found(run).lines[-1]


def test_what_was_printed_before_a_timeout_tells_what_was_waited_for(run) -> None:
    """Lines before the last training step do not count, nor what another node's log says later."""
    saving = "Saving model checkpoint to out/checkpoint-500\n"
    log(run, 1, WAIT.format(2, "BROADCAST", 512))
    assert found(run).name == "broadcast-timeout"
    log(run, 0, saving + "{'loss': 0.2}\n")
    assert found(run).name == "broadcast-timeout"
    log(run, 0, "{'loss': 0.2}\n" + saving)
    assert (found(run).name, found(run).kind) == ("waited-for-save", "effect")


def test_the_traceback_tells_which_of_two_causes_it_is(run) -> None:
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "    {}",
             "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]  # fmt: skip
    log(run, 0, "\n".join(lines).format("loss = step(batch)"))
    assert found(run).name == "gpu-memory"
    log(run, 0, "\n".join(lines).format('state = torch.load("x.pt")'))
    assert found(run).name == "gpu-memory-load"
    log(run, 0, "\n".join(lines).format("loss.backward()"))
    assert found(run).name == "gpu-memory-backward"


def test_another_script_is_told_its_own_word_for_the_batch_size(run) -> None:
    log(run, 0, 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n'
        "    loss.backward()\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")  # fmt: skip
    assert found(run).fix.startswith("set a smaller batch.micro_batch (the plan makes up")
    run.code.mkdir()
    write_json(run.project_file, {"links": {}, "left_out": []})
    command = run.path / "node.sh"
    for said, own in (
        ("train.py --eval-batch-size 4 --batch-size=8", "--batch-size"),
        ("t.py --per_device_train_batch_size 8", "--per_device_train_batch_size"),
        ("t.py data.train_batch_size=128", "data.train_batch_size"),
        ("t.py --global-batch-size 8", "batch size of the script"),
    ):
        command.write_text(f"{said}\n")
        assert found(run).fix.startswith(f"set a smaller {own}; use gradient checkpointing")


def test_an_unknown_exception_is_read_by_its_class_and_words(run) -> None:
    lines = ["Traceback (most recent call last):", '  File "/x/site-packages/abc/io.py", line 5',
             "    raise ValueError(path)", "ValueError: {}"]  # fmt: skip
    log(run, 0, "\n".join(lines).format("File data/train_a.json not found."))
    assert (found(run).name, found(run).certain) == ("general-missing", False)
    assert found(run).cause.startswith("abc could not find or read something: File data/")
    log(run, 0, "\n".join(lines).format("alpha must be above zero"))
    assert (found(run).name, found(run).cause) == (
        "",
        "unknown: abc raised ValueError (io.py, line 5)",
    )
    assert found(run).fix.startswith("read the message, and the frames that lead from io.py")
    lines.insert(1, '  File "train.py", line 7')
    log(run, 0, "\n".join(lines).format("alpha is unknown"))
    assert found(run).fix.endswith("lead from train.py, line 7 into abc")
    lines[-2:] = ["    raise TypeError(path)", "TypeError: {}"]
    log(run, 0, "\n".join(lines).format("alpha is unknown"))
    assert found(run).fix.endswith(" line 7 into abc; if that is right, try another version of abc")
    assert '  File "/x/site-packages/abc/io.py", line 5' in found(run).lines  # raised there
    log(run, 0, "\n".join(lines).format("alpha is 0. Please file an issue on GitHub."))
    assert "issue" not in found(run).fix
    log(run, 0, "\n".join(lines).format("alpha is 0. Please set alpha above 0. Or stop."))
    assert found(run).fix == 'the message says: "Please set alpha above 0"'
    log(run, 0, "\n".join(lines).format("Connection reset by peer"))
    assert found(run).name == "peer-gone"


def test_the_end_of_a_log_without_errors_is_read(run) -> None:
    log(run, 0, "step 1\nInitializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2\n")
    assert found(run).name == "members-missing"
    limit = "slurmstepd: error: *** JOB 2 ON n CANCELLED AT 2026-11-22T10:00:01 DUE TO TIME LIMIT"
    (run.logs / "train-1002.log").write_text(f"{limit}\n")
    assert found(run).name == "members-missing" and limit in found(run).lines
    log(
        run,
        0,
        2 * "The IPv6 network addresses of (gpu-1, 262) cannot be retrieved (gai error: -3)\n",
    )
    assert "the master's name, gpu-1, cannot be resolved" in found(run).cause
    log(run, 0, "Epoch 3: 40%\n")
    assert found(run).name == "time-limit"


def test_the_traceback_in_torchruns_report_is_read(run) -> None:
    said = (
        "Traceback (most recent call last):\n"
        '    File "/x/site-packages/torch/distributed/elastic/errors/__init__.py", line 345, in w\n'
        '    File "train.py", line 7, in main\n      main()\n  ValueError: own\n'
    )
    log(run, 0, report(3, 1, said=said))
    assert (found(run).rank, found(run).lines[-1]) == (3, "ValueError: own")


def test_the_last_lines_are_shown_where_nothing_looks_like_an_error(run) -> None:
    log(run, 0, "step 1\nstep 2\n")
    assert (found(run).name, found(run).lines) == ("", ("step 1", "step 2"))
    assert "these are the last lines" in found(run).cause


def test_a_node_that_waits_in_vain_is_not_blamed(run) -> None:
    waited = "DistStoreError: Timed out after 1801 seconds waiting for clients. 1/2 clients joined."
    log(run, 0, f"torch.distributed.{waited}\n")
    assert (found(run).name, found(run).kind) == ("clients-missing", "effect")
    log(run, 1, "ModuleNotFoundError: No module named 'h5py'\n")
    assert (found(run).name, found(run).node) == ("module-missing", 1)


def test_stuck_rank_and_preflight(run) -> None:
    write_json(
        run.state / "stuck-train-1.json",
        {"time": 1000.0, "rank": 3, "node": 1, "host": "node-2", "line": "rank 3 stands still"},
    )
    record(run, 0, 1001.0, "ValueError: after it")
    assert (found(run).rank, found(run).name) == (3, "stuck")
    problem = "cannot reach 10.0.0.1:61000 (Connection refused)"
    nodes = [
        {"node": 0, "host": "node-1", "ok": True, "problems": [], "seconds": 1},
        {"node": 1, "host": "node-2", "ok": False, "problems": [problem], "seconds": 1},
    ]
    for file in run.state.glob("[sf]*-train-1*.json"):
        file.unlink()
    write_json(run.state / "preflight-train-1.json", {"nodes": nodes, "bad": ["node-2"]})
    finding = found(run)
    assert (finding.node, finding.name, finding.kind) == (1, "preflight", "cause")
    assert finding.lines == (f"preflight: node-2: {problem}",)
    (run.state / "preflight-train-1.json").rename(run.state / "preflight-train-10.json")
    assert diagnose(run.path, "train", 1) is None


def test_batch_log_is_read_for_its_attempt_only(make_run) -> None:
    run = make_run(states={"train": [FAILED | {"job_id": "1002"}] * 3}, phases=("train",))
    (run.logs / "train-1002.log").write_text(
        "error: the first\n2026-01-01T00:00:00Z train attempt 1: FAILED (exit code 1)\n"
        "error: the second\ntriage: train attempt 2: node 1 failed first\nerror: told again\n"
        "2026-01-01T00:00:00Z train attempt 2: FAILED (exit code 1)\n"
        "error: the third\n2026-01-01T00:00:00Z train attempt 3: FAILED (exit code 1)\n"
    )
    for attempt, word in enumerate(("first", "second", "third"), 1):
        finding = diagnose(run.path, "train", attempt)
        assert finding is not None and finding.lines == (f"error: the {word}",)


def test_completed_or_silent_attempts_have_no_finding(make_run) -> None:
    run = make_run(states={"train": [{"state": "COMPLETED"}, FAILED]}, phases=("train",))
    log(run, 0, "ValueError: survived\n")
    assert diagnose(run.path, "train", 1) is None
    assert diagnose(run.path, "train", 2) is None
    assert nothing_found(run.path, "train", 2) == [
        "triage: train attempt 2: no failure was found; there is no log"
    ]


def test_launchers_exception_is_not_the_cause(run) -> None:
    """accelerate raises one after the script has printed its own."""
    log(
        run,
        0,
        'Traceback (most recent call last):\n  File "train.py", line 5, in <module>\n    main()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        'Traceback (most recent call last):\n  File "/venv/bin/accelerate", line 8, in f\n'
        "    sys.exit(main())\n"
        '  File "/venv/lib/site-packages/accelerate/commands/launch.py", line 970, in f\n'
        "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)\n"
        "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit "
        "status 1.\n",
    )
    assert found(run).name == "gpu-memory"


@pytest.mark.parametrize(
    "tag",
    ["3: ", "node-2: ", "(Worker pid=77, ip=10.8.0.1) ", "trainer-1  | ", "2026-05-16T16:39:51Z "],
)
def test_lines_with_a_task_or_host_before_them(run, tag: str) -> None:
    text = 'Traceback (most recent call last):\n  File "train.py", line 5, in <module>\n    f()\n'
    lines = [*text.splitlines(), "ValueError: no such thing"]
    log(run, 0, "".join(f"{tag}{line}\n" for line in lines))
    assert found(run).lines[-1] == "ValueError: no such thing"


@pytest.mark.parametrize("follows", [
    "Connection reset by peer",
    "One of the workers failed",
    "DataLoader worker (pid(s) 4230, 4231) exited unexpectedly",
])  # fmt: skip
def test_a_lost_peers_traceback_gives_way_to_the_one_before(run, follows: str) -> None:
    text = 'Traceback (most recent call last):\n  File "train.py", line 5, in <module>\n    f()\n'
    log(run, 0, f"{text}ValueError: own\n{text}RuntimeError: {follows}\n")
    assert found(run).lines[-1] == "ValueError: own"
    steps = "step\n" * 400
    log(run, 0, f"{text}ValueError: own\n{steps}{text}RuntimeError: {follows}\n")
    assert found(run).lines[-1] == f"RuntimeError: {follows}"


@pytest.mark.parametrize(
    "before",
    [
        "tracker: Connection refused (metrics dropped)",
        "CUDA out of memory. Using the CPU's copy",
        "[Errno 28] No space left on device: cache disabled",
    ],
)
def test_what_a_program_logged_before_an_error_of_its_own_code(run, before: str) -> None:
    log(run, 0, f"{before}\nTraceback (most recent call last):\n"
        '  File "/w/train.py", line 9, in <module>\n    x = rows[9]\n'
        "IndexError: list index out of range\n")  # fmt: skip
    finding = found(run)
    assert finding.brief.endswith("IndexError: list index out of range at train.py, line 9")
    assert (finding.kind, finding.rank) == ("cause", None)


def test_the_short_form_of_a_fix_keeps_a_command_whole() -> None:
    command = "on the login node: python -c 'import a; a.load(\"x\")' (HF_HOME is shared)"
    assert short(f"{command}; then trnslurm resume") == command
    long = "x" * 60
    assert short(f"{long}'s; {long}") == f"{long}'s"


def test_a_crash_in_a_batch_scripts_own_tasks_comes_before_who_noticed(run) -> None:
    """Its srun writes to the first node's log, below the traceback of a rank that lost its peer."""
    noticed = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    log(run, 0, f"""Traceback (most recent call last):
  File "/x/train.py", line 12, in <module>
    dist.all_reduce(x)
{noticed} [10.77.1.2]:42200
srun: error: node-2: task 3: Segmentation fault
srun: error: node-2: task 2: Exited with exit code 1
""")  # fmt: skip
    told = found(run)
    assert (told.name, told.node, told.host) == ("task-crashed", 1, "node-2")


@pytest.mark.parametrize(
    ("rank", "ended", "node", "host"),
    [
        (3, "srun: error: node-2: task 3: Exited with exit code 1", 1, "node-2"),
        (1, "srun: error: node-1: tasks 0-1: Exited with exit code 1", 0, "node-1"),
        (2, "", None, ""),  # better no node than the wrong one, which an admin would drain
    ],
)
def test_a_rank_of_a_batch_script_is_where_its_srun_had_it(run, rank, ended, node, host) -> None:
    run.path.joinpath("node.sh").write_text(
        '"$P" -m trnslurm.node.launcher --once --given -- ./j\n'
    )
    said = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
    log(run, 0, f"""[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/x/train.py", line 16, in <module>
[rank{rank}]:     step()
[rank{rank}]: {said}
{ended}
""")  # fmt: skip
    told = found(run)
    assert (told.rank, told.node, told.host) == (rank, node, host)


@pytest.mark.parametrize(
    ("path", "beside"),
    [
        ("../data/MNIST", True), ("{run}/work/a/../../../Data/x", True), ("data/x", False),
        ("{run}/checkpoints/step-1", False), ("/fsx/data/x", False),
    ],
)  # fmt: skip
def test_data_beside_the_project_are_not_in_the_copy(run, path: str, beside: bool) -> None:
    run.code.mkdir()
    write_json(run.project_file, {"links": {}, "left_out": []})
    path = path.format(run=run.path)
    record(run, 0, 1.0, f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'")
    assert found(run).cause.startswith(f"{path} is next to the project, but the run has") == beside


def test_the_rest_of_a_long_fix_is_told_as_another_way() -> None:
    long = "pass weights_only=False to torch.load for a file that you trust, and for no other file"
    assert rest_of(f"{long}; or update the library") == "update the library"
    assert rest_of(f"{long}; update the library") == "update the library"
    assert rest_of("update the library") == ""
