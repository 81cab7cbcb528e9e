"""Which keys of train a job's Settings marks: read from its source, which nothing imports."""

from __future__ import annotations

from trnslurm.render.marks import marked

FILES = {
    "code/jobs/mine/train.py": b"""
import torch_of_the_nodes_only
from trnslurm.train.rooms import Base as Common
class Settings(Common):
    depth: int
    eval_samples: Free[Positive[int]]
class Other:
    ignored: Free[int]
""",
    "code/trnslurm/train/rooms/__init__.py": b"from trnslurm.train.settings import Base\n",
    "code/trnslurm/train/settings.py": b"""
class Root:
    lr: Free[float]
class Base(Root):
    save_every: OnOff[int]
""",
}


def test_marks_are_those_of_settings_and_its_bases() -> None:
    entry = "code/jobs/mine/train.py"
    assert marked(FILES, entry, "Free") == {"eval_samples", "lr"}
    assert marked(FILES, entry, "OnOff") == {"save_every"}


def test_a_job_without_settings_marks_nothing() -> None:
    for text in (b"", b"print(1)", b"class Settings(", b"from trnslurm.nowhere import Settings"):
        assert marked({"code/jobs/mine/train.py": text}, "code/jobs/mine/train.py", "Free") == set()
