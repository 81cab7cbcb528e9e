"""compile status, verify, gc: what a cache holds, whether it is whole, and pruning it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

PC = ("--cluster", "pc")
GC = ("compile", "gc", *PC, "--yes")


@pytest.fixture
def keys(graphs, cli) -> list[str]:
    """Three keys of one node, the first not used for 30 days, the second for 20, the third now."""
    found = []
    for days, micro_batch in ((30, 1), (20, 2), (0, 4)):
        more = ("--set", f"batch.micro_batch={micro_batch}", "--set", "batch.global_batch=128")
        key = graphs.fill(graphs.facts(cli, "toy", *more))
        then = time.time() - days * 86400 - 60
        used = graphs.files.directory(key) / "used"
        used.touch()
        for file in (used, used.with_name("manifest.json")):
            os.utime(file, (then, then))
        found.append(key)
    return found


def left(graphs) -> list[str]:
    """The keys that have a manifest, and the graphs that are there."""
    manifests = {f.parent.name for f in graphs.cache.glob("trnslurm/*/manifest.json")}
    neffs = {f.parent.name.removeprefix("MODULE_") for f in graphs.cache.rglob("model.neff")}
    assert manifests == neffs
    return sorted(manifests)


def test_empty_cache(graphs, cli) -> None:
    assert cli("compile", "status", *PC).out == f"Nothing is compiled in {graphs.cache}\n"
    assert cli(*GC, "--older-than", "1h").out == "Nothing to remove\n"
    assert cli("compile", "verify", *PC).code == 0


def test_status(graphs, keys, cli, stable) -> None:
    lines = cli("compile", "status", *PC).out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == keys
    assert lines[1].split()[1:3] == ["toy", "1"]
    assert "30 d" in lines[1] and "20 d" in lines[2] and lines[3].endswith("compiled")
    assert lines[-1].startswith("3 keys, ") and lines[-1].endswith(str(graphs.cache))
    said = json.loads(cli("compile", "status", *PC, "--json").out)
    stable.json("compile status", said, free=["keys[].versions"])
    facts = said["keys"]
    assert [f["key"] for f in facts] == keys
    assert all(f["compiled"] and f["bytes"] > 100 and not f["in_use_by"] for f in facts)


def test_verify_names_what_has_changed(graphs, keys, cli) -> None:
    assert cli("compile", "verify", *PC).code == 0
    graph = graphs.cache / f"neuronxcc-2/MODULE_{keys[1]}/model.neff"
    graph.write_text(graph.read_text()[::-1])  # of the same size
    done = cli("compile", "verify", *PC)
    assert done.code == 1
    assert done.out.splitlines() == [
        f"{keys[0]}: whole, 1 file", f"{keys[1]}: {graph} has changed",
        f"{keys[2]}: whole, 1 file",
    ]  # fmt: skip
    assert cli("compile", "verify", keys[0], *PC).code == 0
    assert "no such key" in cli("compile", "verify", "0" * 16, *PC).error


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("--older-than", "25d"), [1, 2]),
        (("--older-than", "2w"), [2]),
        (("--max-size", "1T"), [0, 1, 2]),
        (("--max-size", "0"), []),
        (("--older-than", "25d", "--max-size", "0"), []),
    ],
)
def test_gc_by_age_and_size(graphs, keys, cli, options: tuple[str, ...], kept: list[int]) -> None:
    expected = sorted(keys[n] for n in kept)
    dry = cli(*GC, *options, "--dry-run")
    assert (dry.code, left(graphs)) == (0, sorted(keys))
    assert all((key in dry.out) == (key not in expected) for key in keys)
    done = cli(*GC, *options)
    assert done.code == 0
    assert left(graphs) == expected
    assert ("Removed" in done.out) == (len(kept) < 3)
    # The key is cold, and may be compiled again.
    assert not graphs.facts(cli, "toy", "--set", "batch.global_batch=128")["warm"] or 0 in kept


def test_gc_removes_the_longest_unused_until_it_fits(graphs, keys, cli) -> None:
    sizes = {
        entry["key"]: entry["bytes"]
        for entry in json.loads(cli("compile", "status", *PC, "--json").out)["keys"]
    }
    limit = sizes[keys[1]] + sizes[keys[2]]
    assert cli(*GC, "--max-size", str(limit)).code == 0
    assert left(graphs) == sorted(keys[1:])


def test_gc_keeps_files_that_another_key_names(graphs, cli) -> None:
    shared, own = "neuronxcc-2/MODULE_1/model.neff", "neuronxcc-2/MODULE_2/model.neff"
    old = graphs.fill(graphs.facts(cli, "toy"), shared, own)
    young = graphs.fill(graphs.facts(cli, "toy", "--set", "seq_len=8"), shared)
    done = graphs.cache / "neuronxcc-2/MODULE_2/model.done"  # Neuron would take the graph for there
    done.touch()
    then = time.time() - 10 * 86400
    os.utime(graphs.files.directory(old) / "manifest.json", (then, then))
    assert cli(*GC, "--older-than", "1d").code == 0
    assert not graphs.files.directory(old).exists()
    assert not done.parent.exists()
    assert (graphs.cache / shared).is_file()
    assert cli("compile", "verify", young, *PC).code == 0


def test_gc_follows_no_link(graphs, keys, cli, tmp_path: Path) -> None:
    """Neither to the files that a manifest names, nor to the directory of all keys."""
    inside, outside = graphs.cache / "neuronxcc-2", tmp_path / "elsewhere"
    inside.rename(outside)
    inside.symlink_to(outside)
    assert cli(*GC, "--older-than", "25d").code == 0
    assert not graphs.files.directory(keys[0]).exists()
    assert len([*outside.rglob("model.neff")]) == 3
    every = graphs.cache / "trnslurm"
    every.rename(tmp_path / "keys")
    every.symlink_to(tmp_path / "keys")
    done = cli(*GC, "--max-size", "0")
    assert done.code == 1 and f"error: {every}: its path under" in done.err
    assert len([*(tmp_path / "keys").glob("*/manifest.json")]) == 2


def test_gc_leaves_what_is_in_use(graphs, keys, fake_slurm, cli) -> None:
    """By a run that is pending on graphs that are there, or by one that compiles."""
    train = ("submit", "toy", *PC, "--set", "batch.global_batch=128")
    assert cli(*train).code == 0  # warm: the first key
    assert cli(*train, "--set", "seq_len=9", "--time", "60").code == 0  # cold: claimed
    status = json.loads(cli("compile", "status", *PC, "--json").out)["keys"]
    used = {entry["key"]: entry["in_use_by"] for entry in status}
    assert used.pop(keys[0]) and not used.pop(keys[1]) and not used.pop(keys[2])
    ((claimed, user),) = used.items()
    assert user
    assert cli(*GC, "--max-size", "0").code == 0
    assert left(graphs) == [keys[0]]
    assert graphs.files.directory(claimed).is_dir()

    for job in (1001, 1002, 1003):
        fake_slurm.queue(f"{job}|CANCELLED|None|N/A|")
    assert cli("cancel", "last").code == 0
    fake_slurm.queue()
    assert cli(*GC, "--max-size", "0").code == 0
    assert left(graphs) == []


def test_what_cannot_be_asked_about_is_in_use(graphs, site, fake_slurm, cli, monkeypatch) -> None:
    """On a host without Slurm, or whose controller does not answer."""
    assert cli("submit", "toy", *PC).code == 0
    fake_slurm.refuse("squeue", "squeue: error: Unable to contact slurm controller")
    (entry,) = json.loads(cli("compile", "status", *PC, "--json").out)["keys"]
    assert entry["in_use_by"] == site.run().name
    assert cli(*GC, "--max-size", "0").out == "Nothing to remove\n"


def test_gc_asks(graphs, keys, cli, monkeypatch) -> None:
    refused = cli("compile", "gc", *PC, "--max-size", "0")
    assert refused.code == 1 and "pass --yes" in refused.err
    assert len(left(graphs)) == 3
    assert cli("compile", "gc", *PC).code == 2


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--older-than=soon", "--older-than soon: expected hours, days or weeks"),
        ("--max-size=big", "--max-size big: expected a size"),
    ],
)
def test_bad_age_and_size(graphs, cli, option: str, error: str) -> None:
    assert cli(*GC, option).error.startswith(error)


def test_manifest_cannot_name_files_elsewhere(graphs, cli, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.write_text("x")
    key = graphs.fill(graphs.facts(cli, "toy"))
    manifest = graphs.files.directory(key) / "manifest.json"
    tree = json.loads(manifest.read_text())
    tree["nodes"][0]["files"][0]["name"] = "../precious"
    manifest.write_text(json.dumps(tree))
    assert cli(*GC, "--max-size", "0").code == 0
    assert outside.exists()
