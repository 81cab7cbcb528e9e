"""What jobs declare of their keys: the job refuses what the launcher refuses, in the same words."""

from types import SimpleNamespace

import pytest

from trnslurm.train.errors import TrainError
from trnslurm.train.plan import check_section, read_settings

from ..bad_values import BAD, LLAMA
from .conftest import JOBS, tiny_plan
from .measures import import_job


@pytest.mark.parametrize("recipe", sorted({recipe for recipe, _, _ in BAD}))
def test_a_job_accepts_what_its_recipe_says_and_refuses_what_the_launcher_does(recipe):
    path = JOBS / recipe / "train.py"
    job = import_job(path)

    def check(values):
        changes = {key.replace(".", "__"): value for key, value in values.items()}
        changes["data"] = changes.pop("data__path", "prepared")
        changes |= {"train__strategy": "fsdp"} if recipe == LLAMA else {}
        plan = SimpleNamespace(**tiny_plan("cpu", 1, 1, job=path.parent, **changes))
        read_settings(job.Settings, plan)
        check_section(job.Model, "model", plan)

    check({})
    for _, values, words in (bad for bad in BAD if bad[0] == recipe):
        with pytest.raises(TrainError) as error:
            check(values)
        assert str(error.value).startswith(words)
