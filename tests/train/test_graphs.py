"""The set of compiled graphs: a few trial steps see all of it, whatever the training is then.

On xla-cpu the host collectives cut the graphs: it shows of what they are independent, and not the
set that a Trainium would compile.
"""

import pytest

from .conftest import JOB
from .launches import Launches, Scenario

pytestmark = pytest.mark.rest

WORKERS = 2
# The bias corrections of these betas become exactly 1.0 within ten steps; 0.999 takes 16628.
QUICK = {
    "train__beta1": 0.1, "train__beta2": 0.1, "train__eval_every": 5, "model__n_layer": 1
}  # fmt: skip
TRIAL = QUICK | {"batch__global_batch": 8, "steps": 5}
PAST_SATURATION = {"batch__global_batch": 2, "steps": 12}
TRAININGS = {
    "accumulation 1, past saturation": PAST_SATURATION,
    "accumulation 2": {"batch__global_batch": 4},
    "accumulation 4": {"batch__global_batch": 8},
    "accumulation 7": {"batch__global_batch": 14, "steps": 4},
    "padding": {"batch__global_batch": 3},
    "other steps and rates": {"steps": 6, "train__lr": 0.5, "train__schedule": "linear"},
    "rate 0": {"steps": 4, "train__lr": 0.0},
    "rate 1": {"steps": 4, "train__lr": 1.0, "train__schedule": "constant"},
    "resumed": {"train__save_every": 3, "train__stop_at": 3, "batch__global_batch": 4},
}


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """A trial that fills the cache, and trainings that can only read it."""
    directory = tmp_path_factory.mktemp("graphs")
    launches = Launches(directory, JOB / "text.txt")
    cache = {"path": "cache", "readonly": False}
    launches.launch(WORKERS, Scenario("trial", TRIAL, phase="precompile"), cache=cache)
    trainings = [Scenario(name, TRIAL | changes) for name, changes in TRAININGS.items()]
    trainings += [Scenario("resumed", TRIAL | TRAININGS["resumed"] | {"train__stop_at": 0})]
    mistaken = Scenario("mistaken", TRIAL | PAST_SATURATION, change="stock_adamw")
    launches.launch(WORKERS, *trainings, mistaken, cache=cache | {"readonly": True})
    return launches


@pytest.mark.first
def test_the_trial_compiles_and_leaves_no_numbers(launches):
    assert not (launches.directory / "trial" / "metrics.jsonl").exists()
    output = launches.outputs[0]
    assert "step 3/3 " in output and "step 4" not in output
    assert "losses above are invalid" in output


@pytest.mark.first
@pytest.mark.parametrize("name", TRAININGS)
def test_training_compiles_nothing_that_the_trial_did_not_see(launches, name):
    launches.assert_trial_saw_every_graph("trial", name)


def test_bias_corrections_as_numbers_would_be_seen(launches):
    outcome = launches.outcome("mistaken")

    assert all(result["misses"] > 0 for result in outcome.results)
    assert outcome.column("graphs")[-1] > outcome.column("graphs")[1]
