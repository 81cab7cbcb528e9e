"""A batch script's options: read as sbatch reads them, and each kept, replaced or refused."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnslurm.config.batch_script import _directives, _lines, first_directive, read_batch_script
from trnslurm.config.script import script_tree
from trnslurm.errors import ConfigError

SLURM_CONF = """
ClusterName=x
SlurmctldHost=localhost
AuthType=auth/none
NodeName=localhost
PartitionName=p Nodes=localhost
"""


def written(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "job.sbatch"
    file.write_text("\n".join(["#!/bin/bash", *lines, "srun true", "#SBATCH --qos=late", ""]))
    return file


def by_sbatch(file: Path) -> dict[str, str]:
    """The options that the real sbatch finds. It prints them, and asks no controller for a job
    with a device that the configuration lacks.
    """
    conf = file.with_name("slurm.conf")
    conf.write_text(SLURM_CONF)
    done = subprocess.run(
        ["sbatch", "-vv", "--test-only", "--gres=none", "--gres=lacking:1", str(file)],
        env={"PATH": "/usr/bin:/bin", "SLURM_CONF": str(conf)},
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    found = dict(re.findall(r"^sbatch: ([a-z-]+) +: (.*)$", done.stderr, re.M))
    return {k: v for k, v in found.items() if k not in ("verbose", "test-only", "gres")}


def by_us(file: Path) -> dict[str, str]:
    found = {}
    for number, line in _lines(file.read_text()):
        for directive in _directives(file, number, line):
            found[directive.name] = "set" if directive.value is None else directive.value
    return found


@pytest.mark.parametrize(
    "lines",
    [
        ["#SBATCH -N2 -n 16   # comment", "#SBATCH --hold", "#SBATCH --ntasks-per-node=8#x"],
        ["#SBATCH --comment='a b#c'", '#SBATCH -J "my \\" job"', "  # indented", "", "\t"],
        ["##SBATCH --mem=3G", "# SBATCH --mem=3G", "#SBATCH --mem=5G -p  debug"],
        ["#SBATCH --account a1 --qos=q", "#SBATCH -A a2", "#SBATCH --contiguous"],
        ['#SBATCH\t--wckey="a\\" b"', "#SBATCH--mem=3"],
        ["set -e", "#SBATCH --mem=3G"],
        ["#SBATCH --nodelist=n[1-2]", "#SBATCH -c4"],
        ["#SBATCH --tasks=10          # of a node, as sbatch takes it"],
        ["#SBATCH --out=/a --err /b --part=p", "#SBATCH --cpus-per-t 4 --conti --comm=x"],
    ],
)
def test_the_options_are_those_of_sbatch(tmp_path: Path, lines: list[str]) -> None:
    file = written(tmp_path, *lines)
    assert by_us(file) == by_sbatch(file)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("xy \\\"'#=\t", max_size=8), max_size=3))
def test_quotes_and_comments_are_those_of_sbatch(tmp_path_factory, texts: list[str]) -> None:
    """Or the line is refused, where sbatch guesses what a quotation is that does not end."""
    file = written(tmp_path_factory.mktemp("s"), *(f"#SBATCH --comment=x{t}" for t in texts))
    try:
        found = by_us(file)
    except ConfigError:
        return
    assert found == by_sbatch(file)


def test_what_becomes_of_each_option(tmp_path: Path) -> None:
    file = written(
        tmp_path, "#SBATCH -J a/b -p gpu -A lab -N 2 --ntasks-per-node=8 -t 1-2",
        "#SBATCH --gres=gpu:8 --exclusive --no-requeue -o out/%j --signal=B:usr1@90",
        "#SBATCH --chdir=/data/run --new-option=3 --parsable --mail-type=END",
        "#SBATCH --mail-type=BEGIN",
    )  # fmt: skip
    found = read_batch_script(file)
    assert (found.nodes, found.name, found.directory, found.signal) == (
        2,
        "a/b",
        "/data/run",
        "B:USR1",
    )
    assert found.kept == ("--ntasks-per-node=8", "--gres=gpu:8", "--exclusive", "--new-option=3",
                          "--mail-type=END,BEGIN")  # fmt: skip
    assert found.slurm == {
        "partition": "gpu", "account": "lab", "time_min": 26 * 60, "requeue": False,
        "stop_before_s": 90, "exclusive": False, "gpus_per_node": 0, "mem_per_node_mib": None,
        "cpus_per_task": None,
    }  # fmt: skip
    assert dict(found.replaced).keys() == {"--output=out/%j", "--parsable"}


@pytest.mark.parametrize(
    ("line", "nodes"),
    [("-N 3", 3), ("-n 1", 1), ("-n 16 --ntasks-per-node=8", 2), ("-n 9 --ntasks-per-node 8", 2),
     ("--mem=3G", 1), ("--ntasks-per-node=8", 1)],
)  # fmt: skip
def test_the_number_of_nodes(tmp_path: Path, line: str, nodes: int) -> None:
    assert read_batch_script(written(tmp_path, f"#SBATCH {line}")).nodes == nodes


@pytest.mark.parametrize(
    ("line", "nodes", "room"),
    [("-n 16", 1, 96), ("-n 16 -c 12", 2, 8), ("-n 12 -c 6 --gpus-per-task=a100:2", 3, 4),
     ("-n 100 --mem-per-cpu=24G", 3, 48), ("-n 2 --gpus=16", 2, 96)],
)  # fmt: skip
def test_tasks_alone_take_as_few_nodes_as_have_room(
    site, cli, tmp_path: Path, line: str, nodes: int, room: int
) -> None:
    file = written(tmp_path, f"#SBATCH {line} --time=9")
    done = cli("render", str(file), "--cluster", "p4d", "-o", str(tmp_path / "out"))
    assert f"one p4d.24xlarge node has room for {room} of these tasks" in done.err
    assert f"\n#SBATCH --nodes={nodes}\n" in (tmp_path / "out/train.sbatch").read_text()


@pytest.mark.parametrize(
    ("value", "tasks", "at_most"),
    [("5", (5,), None), ("0-6:2,3%2", (0, 2, 3, 4, 6), 2), ("1,1-2", (1, 2), None)],
)
def test_the_tasks_of_an_array(tmp_path: Path, value: str, tasks, at_most) -> None:
    found = read_batch_script(written(tmp_path, f"#SBATCH --array={value}"))
    assert (found.tasks, found.at_most) == (tasks, at_most)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["#SBATCH -N 2-4"], ":2: --nodes=2-4: use a single number, or pass --nodes"),
        (["", "#SBATCH -a 0-3%"], ":3: --array=0-3%: expected a value such as 0-15%4"),
        (["#SBATCH --array=3-1"], ":2: --array=3-1: expected"),
        (["#SBATCH -N1", "#SBATCH hetjob", "#SBATCH -N2"], "not run heterogeneous jobs"),
        (["#SBATCH --time=never"], ":2: --time never: expected minutes"),
        (["#SBATCH --mem"], ":2: --mem needs a value"),
        (["#SBATCH --comment='a"], ":2: a quotation mark is not closed"),
        (["#SBATCH --signal=B:NONE@60"], ": --signal=B:NONE@60: there is no signal 'NONE'"),
        (["#SBATCH gpu"], ":2: 'gpu' is not an sbatch option"),
        (["#SBATCH -p { gpu }"], "option: is it a placeholder to fill in?"),
        (["#SBATCH --tim=9"], ":2: --tim is ambiguous: it could be --time or --time-min"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(tmp_path: Path, lines, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        _ = read_batch_script(written(tmp_path, *lines)).nodes


def test_a_file_is_a_batch_script_by_its_options(tmp_path: Path) -> None:
    assert first_directive(written(tmp_path, "", "#SBATCH -N2")) == 3
    assert first_directive(written(tmp_path, "cat <<END", "#SBATCH -N2")) == 0
    assert first_directive(tmp_path / "none") == 0
    file = tmp_path / "plain"
    file.write_text("#SBATCH -N2\n")
    with pytest.raises(ConfigError, match="a batch script must begin with"):
        read_batch_script(file)
    none = tmp_path / "none.slurm"
    none.write_text("#!/bin/bash\n# SBATCH --nodes=2\nsrun true\n")
    assert script_tree(none)["launcher"] == "job"


@pytest.mark.parametrize(
    ("code", "levels"),
    [
        ("python train.py", 0), ("torchrun ../src/train.py", 1), ("cd ../..; cd ../../x/", 2),
        ('python $(dirname "$PWD")/ddp.py', 1), ("python ${PWD}/../a.py", 1),
        ("# see ../README", 0),
        ("cd ..", 1), ("echo {1..8} ... x", 0), ("cd ../..", 2),
        ("a=x/../y", 0), ("python $HOME/../a.py", 0), ("ls ./../a", 1),
    ],
)  # fmt: skip
def test_how_far_up_its_commands_reach(tmp_path: Path, code: str, levels: int) -> None:
    assert read_batch_script(written(tmp_path, "#SBATCH -N1", code)).levels_up == levels


def test_the_copy_has_the_directories_above_that_it_names(tmp_path: Path, monkeypatch) -> None:
    (place := tmp_path / "project/slurm").mkdir(parents=True)
    monkeypatch.chdir(place)
    file = written(place, "#SBATCH -N1", "python ../train.py")
    tree = script_tree(file)
    assert (tree["project"], tree["entry"]) == (str(tmp_path / "project"), "slurm/job.sbatch")
    assert tree["launcher_arguments"] == ["--given", "--directory=slurm"]
    monkeypatch.setenv("HOME", str(tmp_path / "project"))
    tree = script_tree(file)
    assert (tree["project"], tree["launcher_arguments"]) == (str(place), ["--given"])
    file = written(place, "#SBATCH -N1 -D /data/run", "true")
    assert script_tree(file)["launcher_arguments"] == ["--given", "--directory=/data/run"]
