"""A command after `--`: what it starts, what trnslurm does in its place, and what it says."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from trnslurm.config import command
from trnslurm.config.command import launcher_for, read_command
from trnslurm.config.entry import Entry
from trnslurm.errors import ConfigError


def read(text: str) -> tuple[str, str, str, str]:
    """What is started, its arguments, by which launcher, and what is left out."""
    found = read_command(text.split())
    launcher = " ".join((found.launcher, *found.launcher_arguments))
    return found.recipe, " ".join(found.arguments), launcher, " ".join(found.left_out)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torchrun --nnodes=2 --nproc-per-node 8 -m a.b --x 1",
         ("-m a.b", "--x 1", "trnslurm", "--nnodes=2 --nproc-per-node 8")),
        ("python3 -m torch.distributed.run --standalone train.py -m",
         ("./train.py", "-m", "trnslurm", "--standalone")),
        ("python -m torch.distributed.launch --nproc_per_node 8 x.py -v",
         ("./x.py", "--local-rank={local_rank} -v", "trnslurm", "--nproc_per_node 8")),
        ("python -m torch.distributed.launch --use_env --nnodes 2 x.py",
         ("./x.py", "", "trnslurm", "--use_env --nnodes 2")),
        ("torchrun --rdzv_endpoint h:1 --tee 3 --role=a scripts/x.py",
         ("scripts/x.py", "", "torchrun --tee 3 --role=a", "--rdzv_endpoint h:1")),
        ("torchrun --no-python ./a.out 3", ("./a.out", "3", "trnslurm", "")),
        ("accelerate launch --num_machines 2 --mixed-precision bf16 -m a", (
            "-m a", "", "accelerate --mixed-precision bf16", "--num_machines 2")),
        ("accelerate launch train.py", ("./train.py", "", "accelerate", "")),
        ("deepspeed --hostfile h --num_gpus 8 --no_local_rank train.py --deepspeed c.json", (
            "./train.py", "--deepspeed c.json", "deepspeed --no_local_rank",
            "--hostfile h --num_gpus 8")),
        ("python -u -m pkg.train +a=b", ("-m pkg.train", "+a=b", "trnslurm", "")),
        ("/opt/venv/bin/python3.11 /data/x.py", ("/data/x.py", "", "trnslurm", "")),
        ("uv run torchrun --nnodes 2 x.py", ("./x.py", "", "trnslurm", "uv run --nnodes 2")),
        ("trl sft --config a.yaml", ("-m trl.scripts.sft", "--config a.yaml", "trnslurm", "")),
        ("composer -n 8 --world_size 16 -m llm.train a.yaml", (
            "-m llm.train", "a.yaml", "trnslurm", "-n 8 --world_size 16")),
        ("fabric run --strategy ddp --num-nodes=2 t.py --devices 4 --x 1", (
            "-- fabric", "run --num_nodes={nodes} --devices={workers_per_node} --node_rank={node} "
            "--main_address={master_addr} --main_port={master_port} --strategy ddp t.py --x 1",
            "script", "--num-nodes=2 --devices 4")),
        ("axolotl train a.yml", ("-m axolotl.cli.train", "a.yml", "trnslurm", "")),
        ("axolotl preprocess a.yml", ("-- axolotl", "preprocess a.yml", "script", "")),
        ("llamafactory-cli train a", ("-- llamafactory-cli", "train a", "script", "")),
        ("./here.sh 1", ("./here.sh", "1", "script", "")),
        ("srun -n 2 --mpi=pmix python -u x.py", (
            "./x.py", "", "srun", "srun -n 2 --mpi=pmix")),
        ("mpiexec -np 2 ./a.out 1", ("./a.out", "1", "srun", "mpiexec -np 2")),
        ("srun torchrun --nnodes 2 x.py", ("./x.py", "", "trnslurm", "srun --nnodes 2")),
        ("srun -l accelerate launch x.py", ("./x.py", "", "accelerate", "srun -l")),
        ("srun --auto-resume=1 python x.py", ("./x.py", "", "srun", "srun --auto-resume=1")),
        ("/usr/bin/env x", ("-- /usr/bin/env", "x", "script", "")),
    ],
)  # fmt: skip
def test_a_command_in_our_terms(text: str, found, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.out", "here.sh"):
        Path(name).touch()
    assert read(text) == found


def test_the_numbers_of_nodes_and_workers() -> None:
    def numbers(text: str) -> tuple[int | None, int | None]:
        found = read_command(text.split())
        return found.nodes, found.workers_on(found.nodes or 1)

    assert numbers("torchrun --nnodes 4 --nproc_per_node=gpu x.py") == (4, None)
    assert numbers("torchrun --nnodes 1:4 --nproc_per_node=2 x.py") == (None, 2)
    assert numbers("composer -n 8 --world_size 16 x.py") == (2, 8)
    assert numbers("fabric run --num-nodes 2 --devices 4 x.py") == (2, 4)
    assert numbers("srun -N2 --ntasks-per-node=8 python x.py") == (2, 8)
    assert numbers("mpirun -np 16 x") == (None, 16)
    # accelerate counts the processes of all machines.
    assert numbers("accelerate launch --num_machines 2 --num_processes 16 x.py") == (2, 8)
    assert numbers("accelerate launch --num_machines 3 --num_processes 16 x.py") == (3, None)
    launch = read_command(["accelerate", "launch", "--num_processes", "16", "x.py"])
    assert [launch.workers_on(nodes) for nodes in (1, 2, 3)] == [16, 8, None]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("torchrun --nnodes", "torchrun: --nnodes needs a value"),
        ("torchrun --nnodes 2", "torchrun: no script is given"),
        ("srun --container-image=a.sqsh python x.py", "--set container.image=a.sqsh"),
        ("srun --export=ALL,A=1 python x.py", "srun: use --set env.A=1 instead of"),
        ("srun --multi-prog a.conf", "--multi-prog changes what runs where"),
        ("mpirun --tune a x", "mpirun: trnslurm does not know the option -tune"),
        ("accelerate test", "-- accelerate launch …"),
        ("A=1 python x.py", "A=1 sets a variable: use --set env.A=1"),
        ("python -c 1", "not its option -c"),
        ("python", "not its interactive shell"),
    ],
)
def test_what_cannot_be_started_is_refused_with_what_works(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_command(text.split())
    assert said in str(refused.value)


def parsers() -> dict[str, argparse.ArgumentParser]:
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    return {"torchrun": get_args_parser(), "accelerate": launch_command_parser()}


@pytest.mark.parametrize("name", ["torchrun", "accelerate"])
def test_the_launchers_have_these_options(name: str) -> None:
    """A flag that took a value, or the other way round, would shift all words after it."""
    known = command._HEADS[name]
    options = {
        (word[:2] + word[2:].replace("-", "_")): action.nargs == 0
        for action in parsers()[name]._actions
        for word in action.option_strings
    }
    flags = {word for word, flag in options.items() if flag} - {"-h", "--help"}
    assert known.flags == flags
    assert known.ours | known.module <= {*options}


def test_deepspeed_has_these_options(monkeypatch, capsys) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    known = command._HEADS["deepspeed"]
    made: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", lambda parser, args=None: made.append(parser)
    )
    runner.parse_args([])
    options = {word: a.nargs == 0 for a in made[0]._actions for word in a.option_strings}
    flags = {word for word, flag in options.items() if flag} - {"-h", "--help"}
    assert known.flags == flags
    assert known.ours <= {*options}


def test_fabric_has_these_options() -> None:
    cli = pytest.importorskip("lightning.fabric.cli")
    words = {word for param in cli._run.params for word in param.opts}
    assert {*command._FABRIC} <= words


def test_how_many_times_a_command_starts() -> None:
    assert launcher_for("-m a", "worker") == "trnslurm"
    assert launcher_for("./a.py", "node") == "python"
    assert launcher_for("-- a", "node") == "script"
    assert launcher_for("-- a", "job") == "job"


@pytest.mark.parametrize(
    ("source", "launcher", "why"),
    [
        ("torch.distributed.init_process_group()", "trnslurm", "per worker: pack reads RANK"),
        ("from lightning import Trainer", "trnslurm", "--per node starts pack-train once per node"),
        ("run(['torchrun', file])\nAccelerator()", "script", "per node: pack starts workers"),
        ("print()", "script", "per node; --per worker starts pack-train once per worker"),
    ],
)
def test_a_package_tells_how_many_times_its_program_starts(
    tmp_path: Path, monkeypatch, source: str, launcher: str, why: str
) -> None:
    package, script = tmp_path / "lib/python3.11/site-packages/pack", tmp_path / "bin/pack-train"
    package.mkdir(parents=True)
    (package / "loop.py").write_text(source)
    script.parent.mkdir()
    script.write_text("#!/x/python3\nimport sys\nfrom pack.cli import main\nsys.exit(main())\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    found = read_command(["pack-train", "fit"])
    assert (found.recipe, found.launcher) == ("-- pack-train", launcher)
    assert why in found.why
    (package / "cli.py").write_text("init_distributed(args)")  # the module of this program
    assert read_command(["pack-train"]).launcher == "trnslurm"
    script.write_text("#!/bin/sh\n")
    assert read_command(["pack-train"]).why == ""


def test_an_entry_is_a_file_a_module_or_a_program() -> None:
    file, module, program = Entry("scripts/a b.py"), Entry("-m pkg.cli.train"), Entry("-- /x/y.sh")
    assert [e.is_python for e in (file, module, program)] == [True, True, False]
    assert [e.is_file for e in (file, module, program)] == [True, False, False]
    assert [e.name for e in (file, module, program)] == [
        "scripts/a b.py",
        "pkg.cli.train",
        "/x/y.sh",
    ]
    assert [e.label for e in (file, module, program)] == ["a-b", "pkg", "y"]
    assert Entry.module("train").label == "train"


def test_an_empty_word_is_no_command() -> None:
    with pytest.raises(ConfigError, match="the word after -- is empty"):
        read_command([""])
