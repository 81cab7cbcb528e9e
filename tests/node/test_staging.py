"""Copies of an environment on nodes' own disks: of real environments, by real processes."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from trnslurm.node import staging

from ..processes import run_process

SHOW = "import sys; print(sys.prefix)"
WARNING = "workers use the shared environment: "


class Staged:
    """An environment on what stands for a shared file system, and a node's own disk."""

    def __init__(self, bench) -> None:
        self.bench = bench
        self.shared, self.local = bench.directory / "shared", bench.directory / "local"
        self.environment = self.shared / "environment"
        for path in (self.shared, self.local):
            path.mkdir()
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(self.environment)], check=True
        )
        self.file("package/näme of one.py").write_text("x = 1\n")
        self.file("package/large.so").write_bytes(b"12345678" * 2**18)
        (self.packages / "link.so").symlink_to("package/large.so")
        os.link(self.file("package/large.so"), self.file("package/same.so"))

    @property
    def packages(self) -> Path:
        return next(self.environment.glob("lib/python*/site-packages"))

    @property
    def python(self) -> str:
        return str(self.environment / "bin/python")

    @property
    def own_local(self) -> Path:
        return self.local / f".trnslurm-{os.getuid()}"

    def file(self, name: str) -> Path:
        file = self.packages / name
        file.parent.mkdir(exist_ok=True)
        return file

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return self.bench.start(self.python, "-m", "trnslurm.node.staging", *words)

    def run(self, *words: str) -> tuple[str, str]:
        """What it prints, and what it says."""
        process = self.start(*words)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0
        return out.removesuffix("\n"), err

    def pack(self) -> str:
        archive, said = self.run("pack", str(self.shared))
        assert WARNING not in said
        return archive

    def unpack(self, archive: str) -> Path:
        """The copy."""
        python, said = self.run("unpack", archive, str(self.local))
        assert WARNING not in said
        return Path(python).parents[1]

    def refused(self, archive: str) -> str:
        """Why there is no copy."""
        python, said = self.run("unpack", archive, str(self.local))
        assert python == self.python
        assert said.count("\n") == 1
        assert said.startswith("warning: ")
        return said.partition(WARNING)[2]

    def copies(self) -> set[str]:
        return {path.name for path in self.own_local.iterdir()} - {"lock"}


@pytest.fixture
def staged(bench) -> Staged:
    return Staged(bench)


def prefix_of(python: Path) -> str:
    done = run_process([python, "-c", SHOW])
    return done.ok.strip()


def tree(directory: Path) -> dict[str, object]:
    return {
        str(path.relative_to(directory)): path.readlink()
        if path.is_symlink()
        else (path.read_bytes(), int(path.stat().st_mtime), path.stat().st_mode & 0o100)
        for path in directory.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_a_copy_is_the_environment_elsewhere(staged: Staged) -> None:
    subprocess.run([staged.python, "-m", "compileall", "-q", staged.packages], check=True)
    copy = staged.unpack(staged.pack())
    assert copy.parent == staged.own_local
    assert prefix_of(copy / "bin/python") == str(copy)
    found = tree(copy)
    assert found == tree(staged.environment)
    assert any(name.endswith(".pyc") for name in found)  # which its sources' times keep valid
    assert copy.parent.stat().st_mode & 0o777 == 0o700


def test_a_copy_serves_later_jobs(staged: Staged) -> None:
    archive = staged.pack()
    copy = staged.unpack(archive)
    Path(archive).write_bytes(b"")  # nobody reads it again
    assert staged.unpack(archive) == copy


def test_an_archive_serves_until_the_environment_changes(staged: Staged) -> None:
    first = staged.pack()
    made = Path(first).stat().st_ino
    subprocess.run([staged.python, "-m", "compileall", "-q", staged.packages], check=True)
    assert staged.pack() == first
    assert Path(first).stat().st_ino == made
    staged.file("package/näme of one.py").write_text("x = 22\n")
    second = staged.pack()
    assert second != first
    copy = staged.unpack(second)
    assert {path.read_text() for path in copy.rglob("näme*.py")} == {"x = 22\n"}
    os.utime(staged.file("package/large.so"), (1, 1))
    assert staged.pack() not in (first, second)


@pytest.mark.parametrize(("command", "did"), [("pack", "packed "), ("unpack", "unpacked to")])
def test_one_of_many_at_once_does_the_work(staged: Staged, command: str, did: str) -> None:
    words = [str(staged.shared)]
    if command == "unpack":
        words = [staged.pack(), str(staged.local)]
    processes = [staged.start(command, *words) for _ in range(5)]
    said = [process.communicate(timeout=600) for process in processes]
    assert len({out for out, _ in said}) == 1
    assert sorted(err.count(did) for _, err in said) == [0, 0, 0, 0, 1]


def test_what_a_dead_node_left_half_made_is_replaced(staged: Staged) -> None:
    archive = Path(staged.pack())
    pipe = staged.shared / archive.name
    os.mkfifo(pipe)
    process = staged.start("unpack", str(pipe), str(staged.local))
    with pipe.open("wb") as end:
        end.write(archive.read_bytes()[: 2**20])
        end.flush()
        staged.bench.await_true(lambda: [*staged.local.rglob("python")], "it is at work")
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=600)
    assert [name[:5] for name in staged.copies()] == [".new-"]
    copy = staged.unpack(str(archive))
    assert staged.copies() == {copy.name}
    assert prefix_of(copy / "bin/python") == str(copy)


def test_a_damaged_archive_is_not_used(staged: Staged) -> None:
    archive = Path(staged.pack())
    data = archive.read_bytes()
    at = data.index(b"x = 1\n")
    for damaged in (data[:at] + b"y" + data[at + 1 :], data[: len(data) // 2], data[:-512], b""):
        archive.write_bytes(damaged)
        assert staged.refused(str(archive))
        assert staged.copies() == set()
    archive.unlink()
    assert staged.refused(str(archive)) == f"{archive}: No such file or directory\n"


def test_a_damaged_copy_is_made_again_unless_it_is_in_use(staged: Staged) -> None:
    archive = staged.pack()
    copy = staged.unpack(archive)
    damage = next(copy.glob("lib/*/site-packages/package/*.py"))
    damage.unlink()
    staged.bench.environ["TRNSLURM_PYTHON"] = f"{copy}/bin/python"
    user = staged.bench.start("sleep", "600")
    del staged.bench.environ["TRNSLURM_PYTHON"]
    assert staged.refused(archive) == f"{copy} was modified and is in use: remove it later\n"
    user.kill()
    user.wait(timeout=600)
    assert staged.unpack(archive) == copy
    assert damage.read_text() == "x = 1\n"


@pytest.mark.parametrize(
    ("limit", "words"),
    [("size=1m", "the archive has "), ("nr_inodes=9", "No space left on device")],
)
def test_a_full_disk_leaves_the_shared_environment(staged: Staged, limit: str, words: str) -> None:
    archive = staged.pack()
    script = 'mount -t tmpfs -o "$1" none "$2"; shift; "${@:2}"; ls -A "$1"/.trnslurm-*'
    command = ["unshare", "--mount", "--user", "--map-root-user", "bash", "-euc", script, "-"]
    process = staged.bench.start(
        *command, limit, str(staged.local), staged.python, "-m", "trnslurm.node.staging", "unpack",
        archive, str(staged.local),
    )  # fmt: skip
    out, err = process.communicate(timeout=600)
    if "Operation not permitted" in err:
        pytest.skip("this user may not mount")
    assert out.split("\n") == [staged.python, "lock", ""]
    assert words in err.partition(WARNING)[2]


def test_a_disk_that_is_not_there_is_not_made(staged: Staged) -> None:
    archive = staged.pack()
    staged.local.rmdir()
    assert staged.refused(archive) == f"there is no directory {staged.local}\n"


def test_only_a_private_directory_of_ones_own_is_used(staged: Staged) -> None:
    archive = staged.pack()
    own, words = staged.own_local, "is not your own directory with mode 0700"
    own.symlink_to(staged.shared)
    assert words in staged.refused(archive)
    own.unlink()
    own.mkdir()
    own.chmod(0o750)
    assert words in staged.refused(archive)
    own.chmod(0o700)
    staged.local.chmod(0o777)
    assert "set its sticky bit" in staged.refused(archive)
    staged.local.chmod(0o1777)
    if os.getuid() == 0:
        os.chown(own, 1, 1)
        assert words in staged.refused(archive)
        os.chown(own, 0, 0)
    assert staged.unpack(archive).parent == own


def test_what_was_used_longest_ago_goes_unless_it_is_in_use(staged: Staged) -> None:
    made = []
    for number in range(staging.KEPT + 2):
        staged.file("package/näme of one.py").write_text(f"x = {10**number}\n")
        archive = staged.pack()
        copy = staged.unpack(archive)
        made.append((archive, copy))
        if number == 0:
            staged.bench.environ["TRNSLURM_PYTHON"] = f"{copy}/bin/python"
            staged.bench.start("sleep", "600")
            del staged.bench.environ["TRNSLURM_PYTHON"]
        for path in (archive, copy):  # one later than the other, whatever the clock's steps
            os.utime(path, (number, number))
    archives, copies = zip(*made, strict=True)
    kept = {str(path) for path in staged.shared.rglob("*.tar")}
    assert kept == {*archives[-staging.KEPT :]}
    assert staged.copies() == {path.name for path in (copies[0], *copies[-staging.KEPT :])}


def test_a_python_in_no_environment_is_not_packed(staged: Staged) -> None:
    (staged.environment / "pyvenv.cfg").rename(staged.shared / "elsewhere")
    out, err = staged.run("pack", str(staged.shared))
    assert out == ""
    assert err.endswith("does not belong to a virtual environment or a conda environment\n")
    assert WARNING in err


def test_an_environment_as_condas_brings_its_python_along(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python finds the standard library beside itself."""
    for part in ("pyvenv.cfg", "bin", "lib", "lib64", "include"):
        path = staged.environment / part
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(True)
    libraries = str(sysconfig.get_config_var("LIBDIR"))  # libpython, where it is not linked in
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries)
    staged.bench.environ["LD_LIBRARY_PATH"] = libraries
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = Path(sysconfig.get_path("stdlib"))
    for part in ("bin", "conda-meta", f"lib/{name}"):
        (staged.environment / part).mkdir(parents=True)
    shutil.copy(Path(sys.executable).resolve(), staged.environment / "bin" / name)
    (staged.environment / "bin/python").symlink_to(name)
    for entry in library.iterdir():
        if entry.suffix == ".py":
            shutil.copy(entry, staged.environment / "lib" / name)
        elif entry.name != "site-packages" and entry.is_dir():
            (staged.environment / "lib" / name / entry.name).symlink_to(entry)
    copy = staged.unpack(staged.pack())
    assert prefix_of(copy / "bin/python") == str(copy)
    done = run_process([copy / "bin/python", "-c", "import os; print(os.__file__)"])
    assert Path(done.ok.strip()) == copy / "lib" / name / "os.py"


def test_an_environment_that_does_not_run_elsewhere_is_not_used(staged: Staged) -> None:
    python = staged.environment / "bin/python"
    real = python.with_name("real")
    python.rename(real)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(str(real))} "$@"\n')
    python.chmod(0o755)
    archive = staged.pack()
    out, err = staged.run("unpack", archive, str(staged.local))
    assert out == str(real)
    assert f"does not run in another directory ({staged.environment})" in err
    assert staged.copies() == set()


def test_usage(bench) -> None:
    assert bench.run("staging", "unpack", "x").returncode == 2
