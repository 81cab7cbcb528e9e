"""What trnslurm leaves in a home is what the admin guide names."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_what_is_left_in_a_home(site, home: Path, fake_slurm, run_cli) -> None:
    fake_slurm.answer("show-config", "ClusterName = mine", "SLURM_VERSION = 23.11.1")
    node = "NodeName=n1 CPUTot=8 RealMemory=32000 Gres=(null) State=IDLE Partitions=all"
    fake_slurm.answer("show-node", node)
    fake_slurm.answer(
        "show-partition", "PartitionName=all Default=YES Nodes=n1 State=UP MaxTime=UNLIMITED"
    )
    (home / "train.py").write_text("print('trained')\n")
    (home / "text.txt").write_text("A text.\n\n" * 40)
    prepare = ("data", "prepare", "gpt2_zero1", "-c", "local", "--text", home / "text.txt")
    for words in (
        ("cluster", "detect", "--write", "--name", "mine"),
        ("submit", home / "train.py", "-c", "local", "--launcher", "python"),
        (*prepare, "--tokenizer", "train:260", "--set", "data.path=small", "--processes", "1"),
        ("status", "last"),
    ):
        done = run_cli(*words)
        assert done.code == 0, done
    mine = {"train.py", "text.txt"}
    found = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()} - mine
    left = ("trnslurm-runs", "trnslurm-data", ".cache/trnslurm", ".local/state/trnslurm")
    left += (".config/trnslurm",)
    assert {place for place in left if any(f.startswith(f"{place}/") for f in found)} == {*left}
    assert not [f for f in found if not f.startswith(tuple(f"{place}/" for place in left))]
    guide = (ROOT / "docs/admin.md").read_text(encoding="utf-8")
    passage = guide.partition("`pip uninstall trnslurm` does not remove")[2].partition("\n\n")[0]
    assert all(f"`~/{place}`" in passage for place in left)
