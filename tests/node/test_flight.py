"""flight: who was not in a collective, by the dumps of PyTorch's flight recorder.

Those in flight/ are PyTorch's own, of Gloo. Those of NCCL are built here, by what
torch/csrc/distributed/c10d/FlightRecorderDetail.hpp (2.9.1) writes: none is from real hardware.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trnslurm.contract.files import write_json
from trnslurm.node.triage.diagnosis import diagnose
from trnslurm.node.triage.finding import Finding
from trnslurm.node.triage.flight import Verdict, judge
from trnslurm.node.triage.flight_dump import plain_value, read_dump
from trnslurm.records.run import RunDir

MADE = Path(__file__).with_name("flight")
TIMED_OUT = (
    "[rank{0}]: Traceback (most recent call last):\n"
    '[rank{0}]:   File "train.py", line 7, in <module>\n'
    "[rank{0}]: RuntimeError: [/x/unbound_buffer.cc:78] Timed out waiting 3000ms for recv "
    "operation to complete\n"
)
NOW = 1_790_000_000.0


@pytest.fixture
def run(make_run) -> RunDir:
    """A run of two nodes with two workers each, in which two ranks waited until a timeout."""
    failed = {"state": "FAILED", "exit_code": 1, "reason": "exit code 1 while running on n1,n2"}
    run = make_run(states={"train": [failed]}, phases=("train",), jobs={"train": "1002"})
    run.plan_file.write_text('{"workers_per_node": 2}')
    for node, rank in enumerate((0, 3)):
        run.node_log("train", 1, node).write_text(TIMED_OUT.format(rank))
    return run


def leave(run: RunDir, case: str, attempt: int = 1) -> None:
    for file in (MADE / case).glob("rank*"):
        run.flight_file("train", attempt, int(file.name[4:])).write_bytes(file.read_bytes())


def found(run: RunDir) -> Finding:
    finding = diagnose(run.path, "train", 1)
    assert finding is not None
    return finding


# -- real dumps


def test_a_rank_that_skips_a_collective_is_named_with_its_host_and_last_line(run) -> None:
    leave(run, "skips")
    finding = found(run)
    assert (finding.rank, finding.node, finding.host) == (2, 1, "node-2")
    assert finding.held_up == (2,)
    report = finding.report()
    assert report[:2] == [
        "triage: train attempt 1: rank 2 on node 1 (node-2) held up the others",
        "  rank 0: RuntimeError: [/x/unbound_buffer.cc:78] Timed out waiting 3000ms for recv "
        "operation to complete",
    ]
    assert report[2].startswith("cause: ") and report[-1] == "see: logs/train-1-node1.log"
    assert (
        finding.cause
        == finding.line
        == (
            "rank 2 never entered all_reduce 4 of default_pg, where the other 3 waited at "
            "make.py:36; it last entered all_reduce 3 of default_pg at make.py:36"
        )
    )


def test_ranks_in_different_collectives_are_told_without_a_culprit(run) -> None:
    leave(run, "other")
    finding = found(run)
    assert (finding.rank, finding.held_up, finding.certain) == (None, (), True)
    assert finding.mend == "submit"  # a resume would fail again
    assert finding.cause == (
        "as collective 4 of default_pg, rank 1 entered broadcast at make.py:35 and "
        "ranks 0, 2 and 3 entered all_reduce at make.py:36"
    )


@pytest.mark.parametrize("case", ["whole", "another attempt", "none"])
def test_nothing_is_claimed(run, case: str) -> None:
    without = found(run)
    if case != "none":
        leave(run, "whole" if case == "whole" else "skips", attempt=1 + (case != "whole"))
    assert found(run) == without and without.name == "collective-timeout"


def test_a_rank_without_a_dump_is_likely_the_reason(run) -> None:
    """Gloo never tells that a rank still waits, so only a dump of NCCL shows it."""
    leave(run, "whole")
    run.flight_file("train", 1, 3).unlink()
    assert not found(run).held_up and "dump" not in found(run).cause
    for rank in range(3):
        run.flight_file("train", 1, rank).write_bytes(nccl(rank, [*steps(6), entry(7)]))
    finding = found(run)
    assert (finding.certain, finding.held_up) == (False, ())
    assert finding.cause == (
        "rank 3 on node-2 wrote no dump of the flight recorder; the other 3 waited in "
        "all_reduce 7 of default_pg at model.py:88"
    )


def test_nccl_waited_and_a_hang_was_ended(run) -> None:
    for rank in range(4):
        entries = steps(6) if rank == 3 else [*steps(6), entry(7)]
        run.flight_file("train", 1, rank).write_bytes(nccl(rank, entries))
    said = (
        "[rank0]:[E ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, "
        "Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
    )
    for node in (0, 1):
        run.node_log("train", 1, node).write_text(f"{said}\n" if node == 0 else "")
    sentence = found(run).cause
    assert sentence.startswith("rank 3 never entered all_reduce 7") and found(run).held_up == (3,)
    assert found(run).lines == (said,)
    line = "worker 3 (node 1, node-2) has made no progress for 1800 s: it is at data.py:31"
    write_json(run.stuck_file("train", 1), {"line": line, "rank": 3, "node": 1})
    finding = found(run)
    assert (finding.name, finding.rank, finding.held_up) == ("stuck", 3, ())
    assert finding.lines == (f"watchdog: {line}", sentence)


def test_several_ranks_held_up_the_others(run) -> None:
    for rank in range(4):
        entries = steps(6) if rank in (1, 3) else [*steps(6), entry(7)]
        run.flight_file("train", 1, rank).write_bytes(nccl(rank, entries))
    finding = found(run)
    assert (finding.rank, finding.host, finding.held_up) == (None, "", (1, 3))
    assert finding.report()[0] == "triage: train attempt 1: ranks 1, 3 held up the others"


def test_a_crash_goes_before_what_the_others_waited_in(run) -> None:
    leave(run, "skips")
    crash = TIMED_OUT.format(2).partition("RuntimeError")[0] + "ValueError: tokens 51\n"
    run.node_log("train", 1, 1).write_text(crash)
    assert not found(run).held_up and "ValueError" in found(run).line


@pytest.mark.rest
def test_the_dumps_here_are_what_pytorch_writes(tmp_path) -> None:
    for case in ("skips", "other"):
        made = tmp_path / case
        command = [sys.executable, str(MADE / "make.py"), case, str(made)]
        subprocess.run(command, check=True, capture_output=True, timeout=200)
        assert verdict_of(made) == verdict_of(MADE / case)


def verdict_of(directory: Path) -> Verdict | None:
    files = {int(file.name[4:]): file for file in directory.glob("rank*")}
    dumps = {rank: dump for rank, file in files.items() if (dump := read_dump(file))}
    return judge(dumps, files, len(files))


# -- dumps as NCCL would write them


def entry(
    number: int, op: str = "all_reduce", *, done: bool = False, group: str = "0", line: int = 88,
    size: int = 4096, dtype: str = "Float", p2p: bool = False, more: int = 0, at: float = NOW,
    by: str = "nccl",
) -> dict[str, Any]:  # fmt: skip
    """Return a collective as getCollectiveTrace does; `more` are messages before it."""
    place = {"name": "step", "filename": "/home/ada/model.py", "line": line}
    torch = {"name": op, "filename": "/env/site-packages/torch/distributed/x.py", "line": 9}
    return {
        "frames": [torch, place],
        "record_id": 0,
        "pg_id": 0,
        "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "thread_name": "python", "thread_id": "1",
        "collective_seq_id": number, "p2p_seq_id": int(p2p), "op_id": number + more,
        "profiling_name": f"{by}:{op}",
        "time_created_ns": int(at * 1e9),
        "input_sizes": [[size]], "input_dtypes": [dtype],
        "output_sizes": [[size]], "output_dtypes": [dtype],
        "state": "completed" if done and by == "nccl" else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": int(at * 1e9) if done else None,
        "retired": done, "timeout_ms": 600000, "is_p2p": p2p,
    }  # fmt: skip


def steps(last: int, first: int = 1, **facts: Any) -> list[dict[str, Any]]:
    return [entry(number, done=True, **facts) for number in range(first, last + 1)]


def nccl(
    rank: int, entries: list[dict[str, Any]], groups: dict[str, list[int]] | None = None,
    begin: int = 0, world: int = 4, gap: int = 0,
) -> bytes:  # fmt: skip
    """Return a dump; `begin` records were overwritten before its first, a gap left out after it."""
    for at, each in enumerate(entries):
        each["record_id"] = begin + at + (gap if at else 0)
    config = {
        name: {"name": name, "desc": "", "ranks": str(ranks)}
        for name, ranks in {"0": [*range(world)], **(groups or {})}.items()
    }
    status = {"0": {"last_enqueued_collective": len(entries) + begin}} if entries or begin else {}
    told = {"version": "2.10", "pg_config": config, "comm_lib_version": "2.27"}
    return pickle.dumps({**told, "pg_status": status, "entries": entries}, protocol=2)


def verdict(
    directory: Path, dumps: dict[int, bytes], world: int = 4, written: float = NOW + 600
) -> Verdict | None:
    files = {}
    for rank, data in dumps.items():
        files[rank] = directory / f"rank{rank}"
        files[rank].write_bytes(data)
        os.utime(files[rank], (written, written))
    return judge(
        {rank: dump for rank, file in files.items() if (dump := read_dump(file))}, files, world
    )


def test_two_of_sixteen_ranks_are_missing(tmp_path) -> None:
    begin = 1_200
    before = steps(1212, first=begin + 1)
    dumps = {
        rank: nccl(rank, [*before, entry(1213, "broadcast", done=True, line=80)], None, begin, 16)
        if rank in (3, 11)
        else nccl(
            rank,
            [*before, entry(1213, "broadcast", done=True, line=80), entry(1214), entry(1215)],
            None,
            begin,
            16,
        )
        for rank in range(16)
    }
    seen = verdict(tmp_path, dumps, 16)
    assert seen and seen.ranks == (3, 11) and seen.certain
    assert seen.sentence == (
        "ranks 3 and 11 never entered all_reduce 1,214 of default_pg, where the other 14 waited "
        "at model.py:88; rank 3 last entered broadcast 1,213 of default_pg at model.py:80"
    )
    dumps[5] = dumps[5][:-40]  # cut off as it was written
    seen = verdict(tmp_path, dumps, 16)
    assert seen and seen.ranks == (3, 11) and "where 13 others waited" in seen.sentence
    del dumps[7]
    seen = verdict(tmp_path, dumps, 16)
    assert seen and not seen.ranks and seen.sentence.endswith("; rank 7 wrote no dump")


def test_a_rank_that_waits_elsewhere_is_no_culprit(tmp_path) -> None:
    """Rank 1 is missing because it waits for rank 3 in another group."""
    groups = {"5": [1, 3]}
    ahead = [*steps(4), entry(5, at=NOW + 1)]
    dumps = {
        0: nccl(0, ahead),
        2: nccl(2, ahead),
        1: nccl(1, [*steps(4), entry(1, group="5", line=40)], groups),
        3: nccl(3, steps(4), groups),
    }
    seen = verdict(tmp_path, dumps)
    assert seen and seen.ranks == (3,)
    assert seen.sentence.startswith(
        "rank 3 never entered all_reduce 5 of default_pg, where 2 others waited at model.py:88"
    )


def test_groups_in_another_order_are_told_without_a_culprit(tmp_path) -> None:
    groups = {"5": [1, 3], "6": [1, 3]}
    dumps = {rank: nccl(rank, [*steps(4), entry(5, done=True)]) for rank in (0, 2)}
    dumps[1] = nccl(1, [*steps(5), entry(1, group="5", line=40)], groups)
    dumps[3] = nccl(3, [*steps(5), entry(1, group="6", line=50)], groups)
    seen = verdict(tmp_path, dumps)
    assert seen and not seen.ranks
    assert seen.sentence == (
        "rank 3 never entered all_reduce 1 of group 5 [1, 3], where rank 1 waited: rank 3 "
        "waited in all_reduce 1 of group 6 [1, 3] at model.py:50"
    )


def test_sizes_and_types_that_differ_are_told(tmp_path) -> None:
    dumps = {rank: nccl(rank, [*steps(4), entry(5, size=10)]) for rank in range(3)}
    dumps[3] = nccl(3, [*steps(4), entry(5, size=9, dtype="BFloat16", line=90)])
    seen = verdict(tmp_path, dumps)
    assert seen and not seen.ranks
    assert seen.sentence == (
        "as collective 5 of default_pg, rank 3 entered all_reduce of 9 BFloat16 at model.py:90 and "
        "ranks 0, 1 and 2 entered all_reduce of 10 Float at model.py:88"
    )
    gather = [nccl(r, [*steps(4), entry(5, "all_to_all", size=r)]) for r in range(4)]
    assert verdict(tmp_path, dict(enumerate(gather))) is None  # there they may


BEHIND = {
    "all have entered it, so the network or a device fails": lambda: nccl(3, [*steps(4), entry(5)]),
    "its collective 4 is another one": lambda: nccl(3, [*steps(3), entry(4, "barrier", done=True)]),
    "it has sent messages, which only its side counts": lambda: nccl(
        3, [*steps(3), entry(4, "send 0->1", done=True, p2p=True), entry(4, done=True)]
    ),
    "it has sent messages before": lambda: nccl(3, [*steps(3), entry(4, done=True, more=2)]),
    "it waits for a message": lambda: nccl(
        3, [*steps(4), entry(4, "recv 3<-2", group="9", p2p=True)]
    ),
    "its dump has lost what it entered": lambda: nccl(3, steps(60, 55, group="9"), begin=54),
    "its dump has another list of the group's ranks": lambda: nccl(3, steps(4), {"0": [0, 3]}),
    # TORCH_INCLUDE_ONLY_ACTIVE
    "what was complete was not written": lambda: nccl(3, steps(4), gap=3),
}


@pytest.mark.parametrize("why", BEHIND)
def test_nobody_is_blamed_without_proof(tmp_path, why: str) -> None:
    dumps = {rank: nccl(rank, [*steps(4), entry(5)]) for rank in range(3)}
    dumps[3] = BEHIND[why]()
    seen = verdict(tmp_path, dumps)
    if "message" in why and "sent" not in why:  # which is told, as it may be why it is late
        assert seen and not seen.ranks and "rank 3 waited in recv 3<-2 of group 9" in seen.sentence
    else:
        assert seen is None


def test_ranks_without_dumps_are_told_only_if_most_have_one_and_waited(tmp_path) -> None:
    waits = {rank: nccl(rank, [*steps(4), entry(5)]) for rank in range(3)}
    assert verdict(tmp_path, {0: waits[0]}) is None
    seen = verdict(tmp_path, waits)
    assert seen and not seen.certain and seen.sentence.startswith("rank 3 wrote no dump")
    elsewhere = nccl(2, [*steps(3), entry(4, "barrier", done=True)])
    assert verdict(tmp_path, {**waits, 2: elsewhere}) is None  # it may as well be rank 2


def test_a_dump_from_before_the_wait_proves_nothing(tmp_path) -> None:
    dumps = {rank: nccl(rank, [*steps(4), entry(5)]) for rank in range(3)}
    dumps[3] = nccl(3, steps(4))
    assert verdict(tmp_path, dumps, written=NOW + 1) is None
    assert verdict(tmp_path, dumps, written=NOW + 600) is not None


def test_a_rank_that_has_entered_nothing_is_likely_the_reason_if_its_dump_is_whole(
    tmp_path,
) -> None:
    dumps = {rank: nccl(rank, [entry(1)]) for rank in range(3)}
    seen = verdict(tmp_path, {**dumps, 3: nccl(3, [])})
    assert seen and not seen.ranks and not seen.certain
    assert seen.sentence.endswith(
        "; it has entered no collective, or NCCL has not connected it yet"
    )
    assert verdict(tmp_path, {**dumps, 3: nccl(3, [], begin=1)}) is None


def test_what_follows_a_collective_that_all_are_in_waits_for_it(tmp_path) -> None:
    dumps = {rank: nccl(rank, [*steps(4), entry(5), entry(6)]) for rank in range(3)}
    dumps[3] = nccl(3, [*steps(4), entry(5)])
    assert verdict(tmp_path, dumps) is None


def test_of_gloo_only_collectives_that_need_all_prove_a_wait(tmp_path) -> None:
    """A rank that sends a broadcast completes it alone, and Gloo does not record that."""
    gloo: dict[str, Any] = {"by": "gloo", "done": True}
    before = steps(4, by="gloo")
    for ops, proven in (
        (("broadcast", "broadcast", "broadcast"), False),
        (("broadcast", "scatter", "scatter"), False),
        (("all_reduce", "all_reduce", "all_reduce"), True),
    ):
        dumps = {rank: nccl(rank, [*before, entry(5, op, **gloo)]) for rank, op in enumerate(ops)}
        dumps[3] = nccl(3, before)
        seen = verdict(tmp_path, dumps)
        assert bool(seen and seen.ranks) == proven, seen
    ops = ("broadcast", "scatter", "scatter", "scatter")
    after = [entry(6, **gloo), entry(7, **gloo)]
    dumps = {r: nccl(r, [*before, entry(5, op, **gloo), *after]) for r, op in enumerate(ops)}
    assert verdict(tmp_path, dumps) is None  # they went on


def test_the_parts_of_a_coalesced_collective_are_no_waits(tmp_path) -> None:
    def coalesced(number: int, done: bool) -> list[dict[str, Any]]:
        parts = [entry(number, "_all_gather_base", more=at) for at in (1, 2)]
        return [*parts, entry(number, "all_gather_into_tensor_coalesced", done=done, more=2)]

    dumps = {rank: nccl(rank, [*coalesced(1, True), *coalesced(2, False)]) for rank in range(3)}
    dumps[3] = nccl(3, coalesced(1, True))
    seen = verdict(tmp_path, dumps)
    assert seen and seen.ranks == (3,)


def test_a_thousand_ranks_take_a_second_or_two(run) -> None:
    run.plan_file.write_text('{"workers_per_node": 512}')
    for rank in range(1024):
        entries = steps(20) if rank == 700 else [*steps(20), entry(21)]
        data = nccl(rank, entries, world=1024)
        run.flight_file("train", 1, rank).write_bytes(data)
    begin = time.thread_time()
    finding = found(run)
    assert time.thread_time() - begin < 5  # 1.1 s, unless others use this machine
    assert (finding.rank, finding.host) == (700, "node-2")
    assert "where the other 1023 waited" in finding.cause


def test_of_many_long_dumps_the_telling_ones_are_read_first(run, monkeypatch) -> None:
    """When the time for it is over, the rest only counts less who waited."""
    asked = iter(range(10_000))  # for each file's beginning, then for nine whole files
    monkeypatch.setattr("trnslurm.node.triage.flight.is_spent", lambda: next(asked) >= 109)
    run.plan_file.write_text('{"workers_per_node": 50}')
    for rank in range(100):
        entries = steps(20) if rank == 77 else [*steps(20), entry(21)]
        run.flight_file("train", 1, rank).write_bytes(nccl(rank, entries, world=100))
    finding = found(run)
    assert finding.held_up == (77,) and "where 8 others waited" in finding.cause


# -- damaged and hostile files


class Hostile:
    """What a pickle may do when it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._file),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_calls_something_is_refused(tmp_path, protocol: int) -> None:
    made, file = tmp_path / "executed", tmp_path / "rank0"
    told = pickle.loads(nccl(0, steps(3)))
    for place in (told, told["entries"][0], told["pg_config"]):
        place["hostile"] = Hostile(made)
        file.write_bytes(pickle.dumps(told, protocol))
        del place["hostile"]
        with pytest.raises(ValueError):
            plain_value(file.read_bytes())
        assert read_dump(file) is None and not made.exists()


def test_plain_values_of_python_are_read_as_pickle_reads_them() -> None:
    value = {
        "a": [1, -1, 255, 256, 65536, 2**40, -(2**60), 1.5, None, True, False, "ä" * 300],
        "c": ((1,), (1, 2), [(1, 2, 3)]), "d": {"e": {}}, "x" * 300: [["f"] * 300],
    }  # fmt: skip
    value["again"] = value["a"]
    for protocol in (2, 3, 4, 5):
        assert plain_value(pickle.dumps(value, protocol)) == value


def test_damaged_dumps_are_left_out(tmp_path) -> None:
    whole = (MADE / "skips" / "rank0").read_bytes()
    file, rng = tmp_path / "rank0", random.Random(7)
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        file.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        dump = read_dump(file)
        judge({0: dump} if dump else {}, {0}, 4)


HOSTILE = {
    "a reference far beyond the memory": b"\x80\x02}j\xff\xff\xff\x7f.",
    "a tuple as a name": b"\x80\x02}N\x85Ns.",
    "a text of four gigabytes": b"\x80\x02X\xff\xff\xff\xff.",
    "millions of lists": b"\x80\x02](" + b"]" * 10**6 + b"e.",
    "no end": b"\x80\x02]q\x00(" + b"h\x00" * 10**6,
    "marks without a list": b"\x80\x02((((eeee.",
    "a list of a text": b"\x80\x02X\x01\x00\x00\x00aNa.",
    "a number of a thousand bits": b"\x80\x02\x8a\x80" + b"\x01" * 128 + b".",
    "half a reference": b"\x80\x02Nq\x00h",
    "nothing": b"",
}
STRANGE = {
    "tuples in tuples": b"\x80\x02N" + b"\x85" * 10**6 + b".",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a place of the memory far away": b"\x80\x02}r\xff\xff\xff\x7f.",
    "too long": b"\x80\x02" + b"N0" * (4 << 20) + b"N.",
}


@pytest.mark.parametrize("case", [*HOSTILE, *STRANGE])
def test_hostile_files_are_left_out(tmp_path, case: str) -> None:
    data = HOSTILE.get(case) or STRANGE.get(case, b"")
    (tmp_path / "rank0").write_bytes(data)
    begin = time.thread_time()
    assert read_dump(tmp_path / "rank0") is None
    if case in HOSTILE:
        with pytest.raises(ValueError):
            plain_value(data)
    assert time.thread_time() - begin < 5


def test_hostile_values_are_left_out(tmp_path) -> None:
    """Whatever one of three dumps has in any place, the others are compared."""
    laughs: list[Any] = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    dumps = {0: nccl(0, [*steps(3), entry(4)], world=4), 1: nccl(1, [*steps(3), entry(4)], world=4)}
    names = (
        *pickle.loads(dumps[0]),
        *entry(1),
        "ranks",
        "filename",
        "line",
        "in sizes",
        "in types",
    )
    long_ = ["\x1b[31m" * 10**5, "a b " * 10**5, 2**63, [[2**62] * 90] * 90, ["x" * 500] * 90]
    for value in (laughs, None, -1, 10**300, 1.0, {}, (), True, *long_):
        for name in names:
            for at in (-1, -2):
                told = pickle.loads(nccl(2, [*steps(3), entry(4)]))
                each = told["entries"][at]
                if name == "ranks":
                    told["pg_config"]["0"][name] = value
                elif name in ("filename", "line"):
                    each["frames"][-1][name] = value
                elif name.startswith("in "):
                    each[f"input_{name[3:]}".replace("types", "dtypes")] = [value]
                else:
                    (told if name in told else each)[name] = value
                seen = verdict(tmp_path, {**dumps, 2: pickle.dumps(told, protocol=2)})
                said = seen.sentence if seen else ""
                assert len(said) < 600 and said.isprintable() and "  " not in said, (name, said)
                assert not (seen and seen.ranks and name == "state"), name


# -- what a job's scripts set


@pytest.mark.parametrize(
    ("given", "set_"),
    [
        ({}, ("2000", "2000", "/run/logs/train-2-nccl-rank")),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, ("0", "0", "/run/logs/train-2-nccl-rank")),
        ({"TORCH_FR_BUFFER_SIZE": "9"}, ("9", "9", "/run/logs/train-2-nccl-rank")),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/r"}, ("2000", "2000", "/mine/r")),
    ],
)
def test_a_users_variables_win_under_either_name(given: dict[str, str], set_: tuple[str]) -> None:
    template = Path(__file__).parents[2] / "templates/device/cuda.node.j2"
    script = re.sub(r"\{#.*?#\}", "", template.read_text(), flags=re.DOTALL)
    own = {"TRNSLURM_RUN_DIR": "/run", "TRNSLURM_PHASE": "train", "TRNSLURM_ATTEMPT": "2"}
    shown = f"set -eu\n{script}\nenv"
    done = subprocess.run(
        ["bash", "-c", shown], env={"PATH": os.environ["PATH"], **own, **given},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    env = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert (env["TORCH_FR_BUFFER_SIZE"], env["TORCH_NCCL_TRACE_BUFFER_SIZE"]) == set_[:2]
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == set_[2]
    assert env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
