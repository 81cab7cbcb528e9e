"""submit when sbatch says no, or says nothing: one line, and nothing left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trnslurm.runs.status import run_status
from trnslurm.schedulers.slurm import start as on_slurm

TRIED = ("test-only", "test-only", "scontrol")
"""Precompile and training differ in their time; then the partition's limits."""
GPT2 = ("submit", "gpt2_zero1", "--cluster", "pc", "--nodes", "2")
SAID = "sbatch: error: Batch job submission failed: Invalid partition name specified"
HINT = "sinfo -o '%P %D %N %c %m %G %f' lists partitions and nodes"
WORDS = "sbatch: Batch job submission failed: Invalid partition name specified"


def error_line(done) -> str:
    """The line below the price and the graphs: the only other one."""
    price, graphs, error = done.err.splitlines()
    assert graphs.startswith("Graphs: ")
    assert "node-hours" in price
    assert done.out == ""
    return error


def test_first_phase_refused(site, fake_slurm, run_cli, cli) -> None:
    fake_slurm.refuse("sbatch", SAID)
    done = run_cli(*GPT2)
    assert done.code == 1
    asked = f"{site.root / 'cluster-config/pc.yaml'}: slurm.partition is compute"
    assert error_line(done) == f"error: {WORDS} ({asked}; {HINT})"
    assert [c.command for c in fake_slurm.calls()] == [*TRIED, "sbatch", "scontrol"]
    assert [*site.run_root.iterdir()] == []


def test_a_refusal_says_what_there_is(site, fake_slurm, cli) -> None:
    node = "NodeName=n{} Partitions=big CPUTot=96 RealMemory=9 Gres={} AvailableFeatures={}"
    fake_slurm.answer("show-partition", "PartitionName=big Default=YES", "PartitionName=small")
    fake_slurm.answer(
        "show-node",
        *(node.format(n, "gpu:a100:8(S:0)", "a100,ib") for n in (1, 2)),
        node.format(3, "(null)", "(null)"),
        node.format(4, "x", "x").replace("big", "small"),
    )
    site.profile(slurm={"partition": None})
    has = "2 nodes with 96 CPUs, 9 MB, GRES gpu:a100:8(S:0), feature a100,ib"
    has = f"partition big has {has}; 1 node with 96 CPUs, 9 MB, no GRES, no feature"
    refused = "Batch job submission failed: Requested node configuration is not available"
    fake_slurm.refuse("sbatch", f"sbatch: error: {refused}")
    wants = "no node has what the job asks for"
    profile = site.root / "cluster-config/pc.yaml"
    asked = f"{profile}: slurm.cpus_per_task is 128, from instance_type trn1.32xlarge"
    assert error_line(cli(*GPT2)) == f"error: sbatch: {refused} ({wants}; {asked}; {has})"
    gres = "Batch job submission failed: Invalid generic resource (gres) specification"
    fake_slurm.refuse("sbatch", f"sbatch: error: {gres}")
    site.profile(slurm={"partition": None, "gpus_per_node": 4})
    asked = f"{profile}: slurm.gpus_per_node is 4"
    wants = "no node has these GPUs as a GRES"
    assert error_line(cli(*GPT2)) == f"error: sbatch: {gres} ({wants}; {asked}; {has})"
    fake_slurm.refuse("sbatch", SAID)
    site.profile(slurm={"partition": "bigg"})
    asked = f"{profile}: slurm.partition is bigg"
    assert error_line(cli(*GPT2)) == f"error: {WORDS} ({asked}; the partitions are big, small)"
    rule = ("sbatch: error: GPU jobs need an account and --mem", "Unspecified error")
    fake_slurm.refuse("sbatch", "\nsbatch: error: Batch job submission failed: ".join(rule))
    assert error_line(cli(*GPT2)).endswith(
        "GPU jobs need an account and --mem; Batch job submission failed: Unspecified error "
        "(set by slurm.account, slurm.mem_per_node_mib (null omits it), slurm.gpus_per_node "
        "and slurm.gpu_type)"
    )


NODE_CONFIG = "allocation failure: Requested node configuration is not available"
PARTITION = "PartitionName=compute State={} MaxTime={} MaxMemPerNode={} AllowAccounts=team,other"
NODE = (
    "NodeName=n{} Partitions=compute CPUTot=128 CPUEfctv=128 RealMemory=500000 Gres={} "
    "AvailableFeatures=big,fast State={}"
)


@pytest.mark.parametrize(
    ("test_only", "states", "limits", "settings", "words"),
    [
        # Enough nodes fit, and are merely down: a warning.
        (NODE_CONFIG, ("IDLE", "UNKNOWN", "IDLE+DRAIN"), ("UP", "UNLIMITED", "UNLIMITED"), {},
         "warning: only 1 of the 3 nodes that fit the job are up, but it needs 2: it waits"),
        (NODE_CONFIG, ("IDLE", "DOWN"), ("UP", "UNLIMITED", "UNLIMITED"),
         {"constraint": "big&fast"}, "warning: only 1 of the 2 nodes that fit"),
        # They are up, and Slurm refuses; they do not fit; they are too few.
        (NODE_CONFIG, ("IDLE", "IDLE"), ("UP", "UNLIMITED", "UNLIMITED"), {},
         "cpus_per_task is 128, from instance_type trn1.32xlarge; partition compute has 2 nodes"),
        (NODE_CONFIG, ("IDLE", "DOWN"), ("UP", "UNLIMITED", "UNLIMITED"), {"cpus_per_task": 192},
         "slurm.cpus_per_task is 192; partition compute has 2 nodes"),
        (NODE_CONFIG, ("IDLE", "DOWN"), ("UP", "UNLIMITED", "UNLIMITED"), {"constraint": "huge"},
         "slurm.constraint is huge"),
        (NODE_CONFIG, ("IDLE", "DOWN"), ("UP", "UNLIMITED", "UNLIMITED"), {"gpus_per_node": 8},
         "slurm.gpus_per_node is 8"),
        (NODE_CONFIG, ("DOWN",), ("UP", "UNLIMITED", "UNLIMITED"), {}, "no node has what"),
        ("allocation failure: Job violates accounting/QOS policy (job submit limit, user's size "
         "and/or time limits)", (), ("UP", "UNLIMITED", "UNLIMITED"), {"qos": "debug"},
         "(sacctmgr show qos lists the limits of each QOS; "),
        # A default that the site's own rules do not count.
        ("Name your account\nsbatch: error: allocation failure: Invalid account or "
         "account/partition combination specified", (), ("UP", "UNLIMITED", "UNLIMITED"), {},
         "(sacctmgr show assoc user=$USER lists yours; slurm.account is not set; "),
        # What --test-only does not see.
        ("", ("IDLE",), ("DOWN", "UNLIMITED", "UNLIMITED"), {},
         "warning: partition compute is DOWN: jobs wait until"),
        ("", ("IDLE",), ("UP", "1-00:00:00", "UNLIMITED"), {"time_min": 2880},
         "error: the job would wait forever: partition compute has MaxTime=1-00:00:00, but "),
        ("", ("IDLE",), ("UP", "1-00:00:00", "UNLIMITED"), {"time_min": 2880, "qos": "long"},
         "warning: the job may wait forever: partition compute has MaxTime=1-00:00:00, but "),
        ("", ("IDLE",), ("UP", "UNLIMITED", "32768"), {"mem_per_node_mib": 40000},
         "slurm.mem_per_node_mib is 40000"),
        ("", ("IDLE",), ("UP", "UNLIMITED", "32768"), {"mem_per_node_mib": 0},
         "the job would wait forever: partition compute has MaxMemPerNode=32768, but "),
        ("", ("IDLE",), ("UP", "UNLIMITED", "UNLIMITED"), {"account": "mine"},
         "warning: the job may wait forever: partition compute has AllowAccounts=team,other, "),
        # Errors that may pass, and jobs that may start.
        ("Unable to contact slurm controller", ("IDLE",), ("UP", "UNLIMITED", "UNLIMITED"), {}, ""),
        ("", ("IDLE",), ("UP", "10-00:00:00", "500000"),
         {"mem_per_node_mib": 0, "account": "team"}, ""),
    ],
)  # fmt: skip
def test_a_job_that_would_never_start_is_refused_before_it_is_queued(
    site, fake_slurm, cli, test_only, states, limits, settings, words
) -> None:
    if test_only:
        fake_slurm.refuse("test-only", f"sbatch: error: {test_only}")
    fake_slurm.answer("show-partition", PARTITION.format(*limits))
    fake_slurm.answer("show-node", *(NODE.format(n, "(null)", s) for n, s in enumerate(states)))
    site.profile(slurm={"partition": "compute"} | settings)
    done = cli(*GPT2)
    if not words or words.startswith("warning"):
        assert done.code == 0
        assert words in done.err if words else "warning" not in done.err
        kept = [f"warning: {text}" for text in site.run().record().warned]
        assert kept == [line for line in done.err.splitlines() if line.startswith("warning: ")]
        assert len(fake_slurm.calls("sbatch")) == 2
        return
    assert done.code == 1
    assert words in error_line(done)
    assert fake_slurm.calls("sbatch") == [] and not site.run_root.exists()


# DefaultAccount|Cluster|Account|Partition|QOS|DefaultQOS|GrpTRES|MaxTRES|MaxWall
TEAM = "team|lab|team||normal,wide|normal||cpu=200|{}"
LIMITED = (
    "ClusterName = lab",
    "AccountingStorageEnforce = associations,limits",
    "AccountingStorageType = accounting_storage/slurmdbd",
)


@pytest.mark.parametrize(
    ("wall", "of_qos", "settings", "words"),
    [
        # Slurm counts all CPUs of nodes that are taken whole.
        ("", "|", {"cpus_per_task": 64}, "error: the job would wait forever: a job can have at "
         "most 200 CPUs (account team), but this one needs 256, because --exclusive takes whole "
         "nodes; --nodes "),
        ("", "|", {"cpus_per_task": 64, "exclusive": False}, ""),
        ("00:30:00", "cpu=400|", {"time_min": 60}, "needs 180; set slurm.max_time_min to 30"),
        # A QOS decides before the account.
        ("", "cpu=400|", {}, ""),
        ("", "|cpu=100", {}, "a job can have at most 100 CPUs (QOS normal and account team)"),
        ("", "|", {"qos": "wide"}, ""),
        # That of a partition may come first, or second.
        # The partition's QOS decides.
        ("", "|", {"partition": "all"}, "warning: the job may wait forever: a job can have at "
         "most 99 CPUs (QOS above and account team), but this one needs "),
        ("", "|", {"partition": "all,compute"}, "warning: the job may wait forever: a job can "),
        ("", "|", {"partition": "all,compute", "cpus_per_task": 8, "exclusive": False}, ""),
        ("", "|", {"partition": "all,short", "cpus_per_task": 8, "exclusive": False}, ""),
        ("", "cpu=999|", {"partition": "short"}, "partition short has MaxTime=00:05:00, but "),
        ("", "|", {"account": "other"}, ""),
    ],
)  # fmt: skip
def test_more_than_the_account_allows_is_refused_before_it_is_queued(
    site, fake_slurm, cli, wall, of_qos, settings, words
) -> None:
    partition = "PartitionName={} State=UP MaxTime={} QoS={}"
    none = "UNLIMITED"
    every = (("compute", none, "N/A"), ("all", none, "above"), ("short", "00:05:00", "N/A"))
    fake_slurm.answer("show-partition", *(partition.format(*each) for each in every))
    nodes = (NODE.format(n, "(null)", "IDLE") for n in (1, 2))
    fake_slurm.answer("show-node", *(node.replace("=compute", "=compute,all") for node in nodes))
    fake_slurm.answer("show-config", *LIMITED)
    fake_slurm.answer("accounting-user", TEAM.format(wall))
    fake_slurm.answer(
        "accounting-qos", f"normal||{of_qos}||", "wide||cpu=999|||", "above||cpu=99|||"
    )
    site.profile(slurm={"partition": "compute"} | settings)
    done = cli(*GPT2)
    if words and not words.startswith("warning"):
        assert (done.code, fake_slurm.calls("sbatch")) == (1, [])
        assert words in error_line(done)
    else:
        assert done.code == 0
        assert words in done.err if words else "warning" not in done.err


def test_second_phase_refused_takes_the_first_back(site, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch-2", SAID)
    done = cli(*GPT2)
    run = site.run()
    assert done.code == 1
    assert error_line(done).startswith(f"error: {WORDS} (") and HINT in done.err
    assert [c.command for c in fake_slurm.calls()] == [
        *(*TRIED, "sbatch", "sbatch", "scontrol", "scancel")
    ]
    assert fake_slurm.calls("scancel")[0].arguments == ["1001"]
    assert cli("status", run.name).out.startswith(f"{run.name}: FAILED (rejected at submission")


def test_job_that_cannot_be_taken_back_is_named(site, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch-2", SAID)
    fake_slurm.refuse("scancel", "scancel: error: Unable to contact slurm controller")
    done = cli(*GPT2)
    run = site.run()
    assert done.code == 1
    error = error_line(done)
    assert WORDS in error  # the cause, not only that of the second trouble
    assert f"trnslurm cancel {run.name}" in error  # what is left to a person
    assert run.record().refused


# Ends a command when it hangs, and not a moment earlier, however busy the machine is.
TIMEOUT = """#!/bin/bash
shift
"$@" & pid=$!
while kill -0 $pid 2> /dev/null; do
  if compgen -G "$TRNSLURM_FAKE_SLURM/calls/*/hanging" > /dev/null; then
    kill $pid
    exit 124
  fi
  sleep 0.02
done
wait $pid
"""


@pytest.fixture
def no_patience(fake_slurm, tmp_path: Path, monkeypatch) -> None:
    """In the place of `timeout`, a stand-in that does not wait."""
    file = tmp_path / "impatient" / "timeout"
    file.parent.mkdir()
    file.write_text(TIMEOUT)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(on_slurm, "_LOOKS_S", (0,))


def test_silent_sbatch_times_out(site, fake_slurm, cli, monkeypatch) -> None:
    monkeypatch.setattr(on_slurm, "_TIMEOUT_S", 3)
    monkeypatch.setattr(on_slurm, "_LOOKS_S", (0,))
    fake_slurm.hang("sbatch")
    done = cli(*GPT2)
    assert fake_slurm.hangs()
    assert done.code == 1
    assert "sbatch: no answer within 3 s" in error_line(done)
    assert site.run().record().refused
    assert fake_slurm.calls("scancel") == []


def test_sbatch_that_tries_again_until_its_time_is_over(
    site, fake_slurm, cli, no_patience, tmp_path
) -> None:
    words = "Slurm temporarily unable to accept job, sleeping and retrying"
    (tmp_path / "impatient/timeout").write_text(
        f"#!/bin/sh\necho 'sbatch: error: {words}' >&2\nexit 124\n"
    )
    assert f"sbatch: no answer within 60 s ({words})" in error_line(cli(*GPT2))


def test_second_sbatch_that_is_silent_takes_the_first_back(
    site, fake_slurm, cli, no_patience
) -> None:
    fake_slurm.hang("sbatch-2")
    done = cli(*GPT2)
    assert done.code == 1
    assert "sbatch: no answer within 60 s" in error_line(done)
    assert site.run().record().refused
    assert [c.arguments for c in fake_slurm.calls("scancel")] == [["1001"]]


@pytest.mark.parametrize("number", [1, 2])
def test_job_that_a_silent_controller_took_is_cancelled(
    site, fake_slurm, cli, no_patience, number: int
) -> None:
    fake_slurm.answer_late(f"sbatch-{number}")
    assert cli(*GPT2).code == 1
    (call,) = fake_slurm.calls("scancel")
    assert sorted(call.arguments) == [str(1000 + n) for n in range(1, number + 1)]
    assert run_status(site.run()).state == "FAILED"


def test_sbatch_that_prints_no_job_id(site, fake_slurm, cli, tmp_path, monkeypatch) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "sbatch").write_text("#!/bin/sh\necho 'Thank you.'\necho 'Have a nice day.'\n")
    (odd / "sbatch").chmod(0o755)
    site.profile(slurm={"bin_dir": str(odd)})
    monkeypatch.setattr(on_slurm, "_LOOKS_S", (0,))
    done = cli(*GPT2)
    assert done.code == 1
    assert "Thank you." in error_line(done)
    assert site.run().record().refused


def test_words_of_several_lines_become_one(site, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch", "sbatch: error: No space left\nsbatch: error:   Write failed")
    done = cli(*GPT2)
    assert "sbatch: No space left; Write failed" in error_line(done)


def test_without_sbatch_nothing_is_made(site, cli) -> None:
    done = cli(*GPT2)
    assert done.code == 1
    assert error_line(done).startswith("error: sbatch not found: load your site's Slurm module")
    assert not site.run_root.exists()


def test_sbatch_is_found_in_the_profiles_directory(site, fake_slurm, cli, monkeypatch) -> None:
    commands, _, rest = os.environ["PATH"].partition(":")
    monkeypatch.setenv("PATH", rest)
    site.profile(slurm={"bin_dir": commands})
    assert cli(*GPT2).code == 0
    assert len(fake_slurm.calls("sbatch")) == 2
    shown = cli("status", "last").out.splitlines()[0]
    assert shown.endswith("(precompile: waiting for jobs of higher priority)")
