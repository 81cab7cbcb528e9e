"""Jobs in a container, on a real Slurm: by a real Podman, and by a stand-in of pyxis that has one.

The image is made of this machine's own files: bash, what node.sh calls, and the libraries of the
Python that runs the tests, which is mounted.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import pytest

from ..processes import run_process
from ..waiting import eventually
from .jobs import Run, User

pytestmark = pytest.mark.rest

PROGRAMS = ["bash", "env", "cat", "date", "mkdir", "sleep", "touch", "uname"]
PYTHON = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"
PATH_INSIDE = "/image/bin:/usr/bin:/bin"
SEEN = """
echo "seen $SLURM_NODEID $(cat /made-of) $PATH $PYTHONPATH $GREETING $PWD"
cat "$1/shared.txt"
if [ -e "$2" ]; then echo "sees $2"; fi
if echo changed 2> /dev/null > "$1/shared.txt"; then echo "writes $1"; fi
if [ "$SLURM_NODEID" = 0 ]; then
  echo '{"attempt": 1, "step": 3, "steps": 3, "loss": 0.5}' >> "$TRNSLURM_RUN_DIR/metrics.jsonl"
fi
"""
STAYS = """
touch "stays-$SLURM_NODEID"
while :; do sleep 1; done
"""
# Podman with what this machine's kernel needs: crun refuses a mix of control groups.
PODMAN = """#!/bin/bash
if [ -d /sys/fs/cgroup/unified ] && [ -z "${ALONE:-}" ]; then
  ALONE=1 exec unshare --mount -- "$0" "$@"
fi
if [ -d /sys/fs/cgroup/unified ]; then umount /sys/fs/cgroup/unified; fi
export CONTAINERS_CONF={conf} CONTAINERS_STORAGE_CONF={storage}
exec {podman} "$@"
"""
# A stand-in of pyxis, which is a plugin: an srun that knows its options, and starts what is to be
# in the image by Podman. As with pyxis the image's own variables win over the job's.
PYXIS = """#!/bin/bash
options=() inside=()
while [[ ${1:-} == -* ]]; do
  case $1 in
    --help) {srun} --help; echo '      --container-image=IMAGE   [a stand-in of pyxis]'; exit ;;
    --container-image=*) image=${1#*=} ;;
    --container-workdir=*) inside+=("--workdir=${1#*=}") ;;
    --container-mounts=*)
      IFS=, read -ra mounts <<< "${1#*=}"
      inside+=("${mounts[@]/#/--volume=}") ;;
    *) options+=("$1") ;;
  esac
  shift
done
if [ -n "${image:-}" ]; then
  for name in $(compgen -e); do
    case $name in PATH | PYTHONPATH) ;; *) inside+=("--env=$name") ;; esac
  done
  set -- {podman} run --rm --init --cgroups=disabled --network=host --uts=host --env='SLURM_*' \\
    "${inside[@]}" "$image" "$@"
fi
exec {srun} "${options[@]}" "$@"
"""


@dataclass(frozen=True)
class Images:
    """Where Podman keeps its images, and programs that use them there."""

    directory: Path
    name: str = "of-this-machine:1"

    @property
    def bin(self) -> Path:
        return self.directory / "bin"

    def podman(self, *words: str, given: bytes = b"") -> str:
        done = subprocess.run(
            [self.bin / "podman", *words], input=given, capture_output=True, timeout=600,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, path_without_slurm: str) -> Images:
    if os.geteuid():
        pytest.skip("the nodes of an ordinary user's sandbox cannot start Podman")
    made = Images(tmp_path_factory.mktemp("images"))
    conf, storage = made.directory / "containers.conf", made.directory / "storage.conf"
    # Root may lack CAP_SYS_RESOURCE, as here, and then Podman's own limits are too high.
    conf.write_text(
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'
        '[engine]\nruntime = "crun"\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\n'
    )
    storage.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{made.directory}/root"\n'
        f'runroot = "{made.directory}/run"\n'
    )
    made.bin.mkdir()
    facts = {"conf": conf, "storage": storage, "podman": shutil.which("podman")}
    assert facts["podman"], "no podman: run `make sandbox`"
    _program(made.bin / "podman", PODMAN, facts)
    variables = (f"ENV PATH={PATH_INSIDE}", "ENV PYTHONPATH=/from-the-image")
    changes = [f"--change={line}" for line in variables]
    made.podman("import", *changes, "-", made.name, given=_root_file_system())
    return made


def _program(file: Path, text: str, facts: dict[str, object]) -> None:
    for name, value in facts.items():
        text = text.replace(f"{{{name}}}", shlex.quote(str(value)))
    file.write_text(text)
    file.chmod(0o755)


def _root_file_system() -> bytes:
    """Return a tar file of PROGRAMS, and of the libraries that they and PYTHON load."""
    programs = [Path(str(shutil.which(name))) for name in PROGRAMS]
    modules = Path(str(sysconfig.get_config_var("DESTSHARED"))).glob("*.so")
    command = ["ldd", *map(str, [*programs, PYTHON, *modules])]
    said = run_process(command).ok
    words = {word for line in said.splitlines() for word in line.split() if not line.endswith(":")}
    libraries = {Path(word) for word in words if word.startswith("/") and Path(word).is_file()}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
        for program in programs:
            tar.add(program, arcname=f"bin/{program.name}")
        for library in sorted(libraries - {*programs}):
            tar.add(library, arcname=str(library)[1:])
        for name, text in (("made-of", "own-files"), ("etc/passwd", "root:x:0:0::/:/bin/bash\n")):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
        for name in ("tmp", "proc", "sys", "dev", "image/bin"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
    return packed.getvalue()


def write(user: User, text: str) -> Path:
    """Write a script of bash."""
    script = user.home / "project" / "said.sh"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/bash\n{text}")
    script.chmod(0o755)
    return script


def settings(images: Images, runtime: str, shared: Path) -> list[str]:
    """Return what runs a job in the image, which sees the directory `shared` as /given."""
    mounts = [f"{shared}:/given:ro", f"{sys.base_prefix}:{sys.base_prefix}:ro"]
    return [
        "device=cpu", "devices=[cpu]", f"container.image={images.name}",
        f"container.runtime={runtime}", f"container.python={PYTHON}",
        f"container.mounts={json.dumps(mounts)}", "env.GREETING=it's me",
    ]  # fmt: skip


def submit(
    user: User, images: Images, runtime: str, text: str, *words: str, more: Sequence[str] = ()
) -> Run:
    """Submit a script of bash on two nodes, in the image."""
    shared = user.home / "shared"
    shared.mkdir(exist_ok=True)
    (shared / "shared.txt").write_text("shared\n")
    bin_dir = images.bin if runtime == "podman" else images.directory / "pyxis"
    bin_dir.mkdir(exist_ok=True)
    if runtime == "pyxis":
        facts = {"srun": user.sandbox.path / "bin/srun", "podman": images.bin / "podman"}
        _program(bin_dir / "srun", PYXIS, facts)
    activate = [f"export PATH={shlex.quote(str(bin_dir))}:$PATH"]
    options = user.options(
        2, *settings(images, runtime, shared), f"activate={json.dumps(activate)}", *more
    )
    return user._submit(str(write(user, text)), *options, "--time", "10", "--", *words)


@pytest.mark.first
@pytest.mark.parametrize("runtime", ["podman", "pyxis"])
def test_the_nodes_part_of_a_job_runs_in_the_image(
    user: User, images: Images, runtime: str
) -> None:
    outside = user.home / "outside"
    outside.mkdir()
    run = submit(user, images, runtime, SEEN, "/given", str(outside))
    run.until("COMPLETED")
    for node in "01":
        said = run.logs("--node", node)
        work = run.path / "work"
        package = f"{run.path}/code/trnslurm.zip"
        path = f"{work}:{package}/trnslurm/node/startup:{package}:{run.path}/code"
        expected = f"seen {node} own-files {PATH_INSIDE} {path} it's me {work}"
        assert expected in said.splitlines()
        assert "shared\n" in said
        assert "sees" not in said, "what is not mounted is not there"
        assert "writes" not in said, "what is mounted to be read is not written"
    assert "step 3/3, loss 0.5" in run.shown()


def test_a_cancelled_job_of_this_machine_leaves_no_process(user: User, images: Images) -> None:
    user.environ["PATH"] = f"{images.bin}:{os.environ['PATH']}"
    script = write(user, STAYS)
    options = ["--cluster", "local", "--nodes", "2", "--set", f"run_root={user.run_root}"]
    sets = settings(images, "podman", user.home)
    words = [*options, *(word for setting in sets for word in ("--set", setting))]
    run = user._submit(str(script), *words, "--detach")
    eventually(lambda: all((run.path / f"work/stays-{node}").exists() for node in "01"))
    user.trnslurm("cancel", str(run.path))
    eventually(lambda: run.state == "CANCELLED")

    def nothing_is_left() -> bool:
        """no process of the run, inside or outside"""
        named = subprocess.run(["pgrep", "-f", str(run.path)], stdout=DEVNULL, check=False)
        return named.returncode == 1

    eventually(nothing_is_left)


def test_an_image_that_is_not_there(user: User, images: Images) -> None:
    none = Images(images.directory, name="localhost/none:1")
    run = submit(user, none, "podman", SEEN, more=("slurm.requeue=false",))
    eventually(lambda: run.state == "FAILED")
    shown = run.shown()
    assert "the container's image could not be fetched or unpacked on this node" in shown
    assert "localhost/none:1" in run.logs("--node", "1")
