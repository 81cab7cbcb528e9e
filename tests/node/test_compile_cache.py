"""A run's graphs on its nodes: compiled, judged, committed, verified; with a stand-in compiler."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from trnslurm.contract.files import read_json
from trnslurm.node.graphs import program as graphs
from trnslurm.node.graphs.compile import read_place
from trnslurm.node.graphs.key import own_versions
from trnslurm.node.graphs.manifest import CacheError, GraphCache
from trnslurm.sandbox.layout import replace_text

from ..waiting import eventually
from .conftest import REPOSITORY

STAND_IN = REPOSITORY / "trnslurm/sandbox/neuron_stand_ins.py"
KEY = "0123456789abcdef"


class Job:
    """A run of two nodes, whose programs run here with the environment of a batch script."""

    def __init__(self, bench, monkeypatch, device: str) -> None:
        self.bench, self.monkeypatch = bench, monkeypatch
        self.run, self.cache = bench.directory / "run", bench.directory / "cache"
        self.files = GraphCache(self.cache)
        self.home = bench.directory / "home"
        (self.run / "state").mkdir(parents=True)
        (self.home / "all").mkdir(parents=True)
        (self.run / "plan.json").write_text('{"nodes": 2, "workers_per_node": 1}')
        (self.run / "graphs.json").write_text('{"micro_batch": 1}')
        (self.run / "precompile.sbatch").touch()
        self.state("RUNNING")
        self.setenv(
            TRNSLURM_RUN_DIR=str(self.run), TRNSLURM_CACHE=str(self.cache), TRNSLURM_ATTEMPT="1",
            TRNSLURM_CACHE_LAYOUT="shared", TRNSLURM_CACHE_TRUST="", TRNSLURM_GRAPH_KEY=KEY,
            TRNSLURM_DEVICE=device, NEURON_COMPILE_CACHE_URL=str(self.cache), USER="ada",
        )  # fmt: skip

    def setenv(self, **values: str) -> None:
        for name, value in values.items():
            self.monkeypatch.setenv(name, value)
        self.bench.environ |= values

    def state(self, word: str) -> None:
        text = json.dumps({"state": word, "job_id": "4711"})
        (self.run / "state/precompile-1.json").write_text(text)

    def behave(self, word: str) -> None:
        replace_text(self.home / "all" / "neuron_parallel_compile", word)

    def tool(self, *command: str) -> list[str]:
        stand_in = [sys.executable, "-I", str(STAND_IN), "--home", str(self.home)]
        return ["--", *stand_in, "neuron_parallel_compile", *command]

    def on_node(self, node: int, *command: str):
        self.setenv(SLURM_NODEID=str(node))
        return self.bench.run("graphs", "compile", *(command or self.tool("true")))

    def verify(self, node: int = 0) -> int:
        self.setenv(SLURM_NODEID=str(node))
        return graphs.main(["verify"])

    def is_warm(self) -> bool:
        self.setenv(SLURM_NODEID="0")
        return graphs.is_warm(read_place())

    def commit(self) -> None:
        self.setenv(SLURM_NODEID="0")
        graphs.commit(read_place())

    def compile(self) -> None:
        assert [self.on_node(node).returncode for node in (0, 1)] == [0, 0]
        self.commit()

    def neff(self, number: int) -> Path:
        (path,) = self.cache.glob(f"neuronxcc-*/MODULE_{number}+*/model.neff")
        return path


@pytest.fixture
def job(bench, monkeypatch) -> Job:
    return Job(bench, monkeypatch, "neuron")


def test_compiled_committed_and_whole(job: Job, capsys) -> None:
    assert job.verify() == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: nothing is compiled for key {KEY} in {job.cache}: run cd ")
    assert "sbatch precompile.sbatch" in said
    assert not job.is_warm()
    job.compile()
    manifest = job.files.read(KEY)
    assert len(manifest.files) == 4
    assert [(n.node, n.graphs, n.compiled) for n in manifest.nodes] == [(0, 4, 4), (1, 4, 4)]
    assert (manifest.made["job"], manifest.ingredients) == ("4711", {"micro_batch": 1})
    assert "Total graphs: 4" in (job.cache / f"trnslurm/{KEY}/output/node1.log").read_text()
    assert [job.verify(node) for node in (1, 0)] == [0, 0]
    assert (job.cache / f"trnslurm/{KEY}/used").exists()
    assert job.is_warm()


def test_a_deleted_graph_is_named_and_compiled_again(job: Job, capsys) -> None:
    job.compile()
    neff = job.neff(3)
    neff.unlink()
    capsys.readouterr()
    assert [job.verify(node) for node in (0, 1)] == [1, 1]
    said = capsys.readouterr().err
    assert said.count(f"damaged: {neff} is missing: run cd ") == 2
    assert not job.is_warm()
    job.compile()
    assert job.verify() == 0


def test_a_changed_graph_is_found_by_the_node_that_reads_it(job: Job, capsys) -> None:
    job.compile()
    neff = job.neff(2)
    content = neff.read_bytes()
    neff.write_bytes(content[:-2] + b"!\n")
    assert sorted(job.verify(node) for node in (0, 1)) == [0, 1]
    assert f"{neff} has changed" in capsys.readouterr().err
    assert not job.is_warm()
    assert not neff.exists()  # or the compiler would take it for good


@pytest.mark.parametrize(
    ("behaviour", "code", "reason"),
    [
        ("failed-graphs", 0, "2 of 4 graphs could not be compiled"),
        ("failed-old", 0, "2 of 4 graphs could not be compiled"),
        ("failed-256", 0, "256 of 256 graphs could not be compiled"),
        ("killed", 0, "the compiler was killed on 2 of 4 graphs"),
        ("exception", 0, "a compile process died"),
        ("no-graphs", 0, "found no graphs"),
        ("script-error", 1, "the trial run failed"),
    ],
)
def test_every_trap_of_the_tool_fails_the_precompile(job: Job, behaviour, code, reason) -> None:
    """The node itself fails in the trial run alone: srun then ends the others, who wait for it."""
    job.behave("ok")
    assert job.on_node(1).returncode == 0
    job.behave(behaviour)
    done = job.on_node(0)
    assert done.returncode == code
    (line,) = [li for li in done.stderr.splitlines() if li.startswith("error: precompile on ")]
    assert reason in line
    assert reason in json.loads((job.run / "state/graphs-1-node0.json").read_text())["problem"]
    with pytest.raises(CacheError, match=f"precompile on .*: .*{re.escape(reason)}"):
        job.commit()
    assert job.files.read(KEY) is None


def test_a_node_without_the_tool_ends_the_others(job: Job) -> None:
    """As one whose tool dies before or in the trial run, in which its workers are missed."""
    assert job.on_node(0, "--", "./no-such-tool").returncode == 1
    assert job.on_node(0, "--", "sh", "-c", "exit 3").returncode == 3
    assert job.on_node(0, "--", "sh", "-c", "kill -9 $$").returncode == 128 + 9


def test_a_tool_that_is_killed_as_it_compiles_does_not_end_the_others(job: Job) -> None:
    said = "INFO ||NEURON_PARALLEL_COMPILE||: New graph list from script 1: "
    done = job.on_node(0, "--", "sh", "-c", f"echo '{said}'; kill -9 $$")
    assert (done.returncode, "it was ended by signal 9" in done.stderr) == (0, True)


def test_what_was_interrupted_is_compiled_again(job: Job) -> None:
    job.behave("slow")
    job.setenv(SLURM_NODEID="0")
    process = job.bench.program("graphs", "compile", *job.tool("true"))
    while "Compiling" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM
    job.behave("ok")
    done = job.on_node(0)
    assert "4 graphs were skipped because an earlier compile of them failed" in done.stderr
    job.setenv(NEURON_CC_FLAGS="--retry_failed_compilation --model-type=transformer")
    job.compile()
    assert job.verify() == 0


def test_a_graph_that_no_node_compiled_is_no_success(job: Job) -> None:
    """Each took it for the other's, as one does that finds it locked."""
    lost = f"{job.cache}/neuronxcc-0/MODULE_9"
    for node in (0, 1):
        job.on_node(node)
        path = job.run / f"state/graphs-1-node{node}.json"
        result = json.loads(path.read_text())
        result["graphs"].append(lost)
        path.write_text(json.dumps(result))
    with pytest.raises(CacheError, match=f"needs {lost}, which no node has compiled"):
        job.commit()
    Path(lost).mkdir()
    (Path(lost) / "model.neff").write_text("by a third one")
    job.commit()
    assert len(job.files.read(KEY).files) == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lock_is_removed_when_the_compile_that_left_it_has_ended(
    job: Job, capsys, number: signal.Signals
) -> None:
    """KILL stands for a reboot of the node: the attempt records no end, and the next one counts."""
    job.behave("stale-lock")
    lock = job.cache / "neuronxcc-0/MODULE_1+standin/model.hlo_module.pb.lock"
    other = lock.parent.with_name("MODULE_7") / lock.name
    other.parent.mkdir(parents=True)
    other.touch()
    job.setenv(SLURM_NODEID="0")
    process = job.bench.program("graphs", "compile", *job.tool("true"))
    while "Another process must be" not in process.stdout.readline():
        pass
    note = job.cache / f"trnslurm/{KEY}/left/4711-node0.json"
    eventually(lambda: read_json(note).get("locks"))
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert f"if no such process exists, remove {lock}" in err
    assert not job.is_warm()
    assert lock.exists(), "its run may go on on another node"
    if number == signal.SIGTERM:
        job.state("CANCELLED")
    else:
        job.setenv(TRNSLURM_ATTEMPT="2")
    capsys.readouterr()
    assert not job.is_warm()
    said = capsys.readouterr().out
    assert not lock.exists() and f"left by a compile that has ended: {lock} (" in said
    assert other.exists() and f"If no process is compiling it, remove {other} (" in said


def test_a_lock_that_was_taken_again_stays(job: Job) -> None:
    left = job.cache / f"trnslurm/{KEY}/left"
    left.mkdir(parents=True)
    lock = job.cache / "neuronxcc-0/MODULE_1/model.hlo_module.pb.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    locks = [{"path": str(lock), "mtime_ns": lock.stat().st_mtime_ns - 1}]
    taker = {"run": str(job.run), "attempt": 1, "job": "4711", "node": 0, "locks": locks}
    (left / "4711-node0.json").write_text(json.dumps(taker))
    job.state("FAILED")
    assert not job.is_warm()
    assert lock.exists()


def test_per_host_is_cold_on_another_host(job: Job, monkeypatch, capsys) -> None:
    job.setenv(
        TRNSLURM_CACHE_LAYOUT="per-host",
        NEURON_COMPILE_CACHE_URL=f"{job.cache}/hosts/{os.uname().nodename}",
    )
    job.compile()
    assert job.verify(1) == 0
    here = os.uname()
    there = os.uname_result(("Linux", "elsewhere", "6", "1", "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: there)
    assert job.verify(1) == 1
    assert "nothing is compiled for key 0123456789abcdef on elsewhere" in capsys.readouterr().err
    assert not job.is_warm()

    job.setenv(NEURON_COMPILE_CACHE_URL=f"{job.cache}/hosts/elsewhere")
    for node in (0, 1):
        assert job.on_node(node).returncode == 0
        result = job.run / f"state/graphs-1-node{node}.json"
        result.write_text(
            result.read_text().replace(f'"host": "{here.nodename}"', '"host": "elsewhere"')
        )
    job.commit()
    for host in (there, here):  # what one host compiles the other keeps
        monkeypatch.setattr(os, "uname", lambda host=host: host)
        assert job.verify(1) == 0


def test_graphs_in_var_tmp_are_never_warm(job: Job, monkeypatch) -> None:
    job.compile()
    assert job.is_warm()
    monkeypatch.delenv("NEURON_COMPILE_CACHE_URL")
    assert not job.is_warm()


def test_a_url_lists_no_files_and_says_so(job: Job, capsys) -> None:
    job.setenv(NEURON_COMPILE_CACHE_URL="s3://bucket/cache")
    job.compile()
    assert job.verify() == 0
    assert capsys.readouterr().out.count("files not visible from this node") == 2


def test_on_a_cpu_each_worker_has_its_own_cache(bench, monkeypatch, capsys) -> None:
    job = Job(bench, monkeypatch, "xla-cpu")
    xla = job.cache / f"trnslurm/{KEY}/xla"
    fill = ["--", "sh", "-c", 'echo graph > "$0/$SLURM_NODEID/123"', str(xla)]
    assert [job.on_node(node, *fill).returncode for node in (0, 1)] == [0, 0]
    job.commit()
    assert job.verify(1) == 0
    (xla / "1/123").unlink()
    assert job.verify(1) == 1
    assert f"{xla}/1/123 is missing" in capsys.readouterr().err
    done = job.on_node(0, "--", "true")
    assert (done.returncode, "compiled no graph" in done.stderr) == (1, True)
    done = job.on_node(0, "--", "sh", "-c", "exit 7")
    assert (done.returncode, "trial run failed (exit code 7)" in done.stderr) == (7, True)


def test_output_passes_through_as_it_comes(job: Job) -> None:
    """Half lines too; and what the command leaves running does not hold up its end."""
    process = job.bench.program(
        "graphs", "compile", *job.tool("sh", "-c", "printf half; sleep 600 &")
    )
    assert "stand-in" in process.stdout.readline()
    assert process.stdout.read(4) == "half"
    out = process.stdout.read()  # not communicate(), which loses what was read ahead
    assert (process.wait(600), out.count("Extracting graphs")) == (0, 4)


def test_who_is_trusted(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "manifest.json"
    file.touch()
    if os.getuid() == 0:
        os.chown(file, 4242, -1)
    owner = file.stat().st_uid
    cache = GraphCache(tmp_path, {owner})
    cache.refuse_untrusted(file)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(CacheError, match="whom compile_trust does not name"):
        GraphCache(tmp_path).refuse_untrusted(file)
    file.chmod(0o666)
    with pytest.raises(CacheError, match=r"manifest\.json: every user can write to it"):
        cache.refuse_untrusted(file)


def test_damage_is_what_another_user_may_have_written(job: Job) -> None:
    job.compile()
    job.neff(1).chmod(0o666)
    said = job.files.first_damage(job.files.read(KEY), hashes=False)
    assert "every user can write to it" in said


def test_versions_of_a_container_are_told_from_inside(bench, monkeypatch) -> None:
    """What the program prints in the image is what the key is made of on the node."""
    inside = bench.run("graphs", "versions")
    assert inside.returncode == 0
    assert json.loads(inside.stdout) == own_versions()
    monkeypatch.setenv("TRNSLURM_VERSIONS", '{"torch": "2.9.1+of-the-image"}')
    assert own_versions() == {"torch": "2.9.1+of-the-image"}
