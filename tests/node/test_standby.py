"""Workers that are started ahead, and wait at a gate: real processes on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trnslurm
from trnslurm.node import memory, standby
from trnslurm.node.memory import HostMemory

ROOT = Path(trnslurm.__file__).parents[1]
SCRIPT = """\
\"\"\"A script.\"\"\"
import json, os, sys
from heavy import Model

import own
names = ("TRNSLURM_RESUME", "TRNSLURM_STANDBY", "TRNSLURM_GATE")
with open("ran.json.new", "w") as file:
    json.dump([sys.argv[1:], [os.environ.get(name) for name in names]], file)
os.rename("ran.json.new", "ran.json")
sys.exit(5)
"""


# Like transformers, it loads a part when that is named.
HEAVY = """\
def __getattr__(name):
    if name != "Model":
        raise AttributeError(name)
    from heavy import part
    return part
"""


class Waiting:
    """A launcher whose only worker waits."""

    def __init__(self, bench: Any) -> None:
        self.directory: Path = bench.directory
        for name, text in {
            "script.py": SCRIPT,
            "own.py": "open('own', 'w').close()\n",
            "lib/heavy/__init__.py": HEAVY,
            "lib/heavy/part.py": "open('imported', 'w').close()\n",
        }.items():
            (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
            (self.directory / name).write_text(text)
        path = f"{ROOT}/trnslurm/node/startup:{ROOT}:{self.directory}/lib"
        bench.environ |= {"RANK": "0", "PYTHONPATH": path, "TRNSLURM_STANDBY": "2"}
        words = ("--workers=1", "--", sys.executable, "script.py", "--at", standby.RESUME)
        program = (sys.executable, "-m", "trnslurm.node.standby")
        self.process: subprocess.Popen[str] = bench.start(*program, *words, stdin=subprocess.PIPE)
        bench.await_files("imported")

    def ran(self) -> bool:
        return (self.directory / "own").exists() or (self.directory / "ran.json").exists()


@pytest.fixture
def waiting(bench: Any) -> Waiting:
    return Waiting(bench)


def test_the_gate_opens(waiting: Waiting) -> None:
    """The script then runs as if it had been started with that checkpoint."""
    assert not waiting.ran()
    waiting.process.communicate(json.dumps({"TRNSLURM_RESUME": "/x/step-20"}) + "\n", 60)
    assert waiting.process.returncode == 5
    argv, environ = json.loads((waiting.directory / "ran.json").read_text())
    assert argv == ["--at", "/x/step-20"]
    assert environ == ["/x/step-20", None, None]


def test_nobody_opens_the_gate(waiting: Waiting) -> None:
    waiting.process.communicate("", 60)
    assert waiting.process.returncode == 0 and not waiting.ran()


def test_the_keeper_of_the_gate_is_killed(waiting: Waiting, bench: Any) -> None:
    """The worker ends, and does not train."""
    waiting.process.kill()
    bench.await_none_alive()
    assert not waiting.ran()


def test_memory_is_short(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(memory, "_of_cgroups", lambda: iter([HostMemory(0.5, 8.0)]))
    assert standby.main(["--workers=2", "--", "false"]) == 0
    assert "GiB of memory available, but needs" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('"""Text."""\nfrom __future__ import annotations\nimport a, b.c\nfrom d.e import f\n',
         ["__future__:annotations", "a:", "b.c:", "d.e:f"]),
        ("import a\nimport os\nos.environ['HF_HOME'] = '/x'\nimport b\n", ["a:", "os:"]),
        ("import a\ntry:\n    import b\nexcept ImportError:\n    b = None\n", ["a:"]),
        ("import a\nfrom . import b\nimport c\n", ["a:"]),
        ("import a\nimport mine.part\nimport c\n", ["a:"]),
        ("import a\nfrom package import x\nimport c\n", ["a:"]),
    ],
)  # fmt: skip
def test_leading_imports(tmp_path: Path, text: str, names: list[str]) -> None:
    """Up to one of the project, and up to the first other statement."""
    (tmp_path / "mine.py").touch()
    (tmp_path / "package").mkdir()
    script = tmp_path / "train.py"
    script.write_text(text)
    found = standby.leading_imports(script, tmp_path)
    assert [f"{name}:{','.join(parts)}" for name, parts in found] == names
