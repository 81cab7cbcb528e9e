"""A worker that computes wrong numbers is found and named; healthy ones are not."""

import itertools
import random

import pytest
import torch

from trnslurm.train.loop.verify import EXIT_CODE, Verdict, digest, judge

from .attempts import SCRIPT, Run
from .conftest import REPO, run_workers

WORKER = REPO / "tests/train/wrong_worker.py"


def computed(world, wrong, how, calls):
    """What each worker would send in both rounds, if one computes wrong numbers."""

    def value(worker, unit):
        unit %= world
        calls[worker] += 1
        if worker == wrong and (how != "once" or calls[worker] == 1):
            return f"{unit} wrong" + (f" {calls[worker]}" if how == "random" else "")
        return f"{unit}"

    return [[value(w, w), value(w, w + 1), value(w, w), value(w, w + 1), value(w, w + 2)]
            for w in range(world)]  # fmt: skip


@pytest.mark.parametrize("how", ["always", "random", "once"])
def test_the_wrong_worker_is_named(how):
    for world in range(2, 7):
        for wrong in range(world):
            calls = [0] * world
            verdict = judge(computed(world, wrong, how, calls))
            if world == 2 and how == "always":
                assert verdict.wrong is None and set(verdict.others) == {0, 1}
            else:
                assert verdict.wrong == wrong, (world, wrong, verdict)
                assert wrong not in verdict.others


def test_nobody_is_named_where_nothing_is_ever_equal():
    number = itertools.count()
    sent = [[f"{next(number)}" for _ in range(5)] for _ in range(4)]
    assert judge(sent) == Verdict(ends=True)


def test_a_single_bit_changes_the_digest():
    chance = random.Random(3)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensors = [torch.randn(5, 7).to(dtype), torch.randn(3).to(dtype)]
        before = digest(tensors)
        assert before == digest([tensor.clone() for tensor in tensors])
        for _ in range(200):
            tensor = chance.choice(tensors)
            bits = tensor.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[
                tensor.element_size()])  # fmt: skip
            place, bit = chance.randrange(len(bits)), chance.randrange(8 * tensor.element_size())
            was = bits[place].item()
            size = 8 * tensor.element_size()
            flipped = (was ^ (1 << bit)) & ((1 << size) - 1)
            bits[place] = flipped - (1 << size) if flipped >> (size - 1) else flipped
            assert digest(tensors) != before
            bits[place] = was
    swapped = torch.tensor([1.0, 2.0])
    assert digest([swapped]) != digest([swapped.flip(0)])


def start(run, wrong, attempt=1):
    return run_workers(
        run.workers, WORKER, "plan.json", cwd=run.path, WRONG=wrong, JOB=str(SCRIPT),
        TRNSLURM_ATTEMPT=str(attempt),
    )  # fmt: skip


CHANGES = {"steps": 12, "train__save_every": 2, "train__verify_every": 3, "train__keep_last": 9}


@pytest.mark.rest
def test_a_flipped_bit_ends_the_attempt_before_a_checkpoint_counts(tmp_path):
    """And the next attempt has, bit for bit, the losses of one that was never disturbed."""
    healthy = Run(tmp_path / "a", **{**CHANGES, "train__verify_every": 0})
    healthy.undisturbed()
    run = Run(tmp_path / "b", workers=3, **CHANGES)
    done = start(run, "1 5 always")
    assert done.returncode != 0
    assert (
        "error: worker 1 (node 0) computes wrong gradients before step 6: worker 0 and 2 computed "
        "different ones from the same micro-batch; all were equal before step 3"
    ) in done.stdout, done.stdout
    stuck = run.state("stuck-train-1")
    assert (stuck["node"], stuck["step"]) == (0, 6)
    names = sorted(path.name for path in (run.path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004.damaged-1"], "that of step 4 may be wrong"
    assert EXIT_CODE == 70
    run.undisturbed(2)
    losses = {line["step"]: line["loss"] for line in run.lines()}
    wanted = {line["step"]: line["loss"] for line in healthy.lines()}
    assert losses.keys() == wanted.keys()
    for step, loss in wanted.items():
        assert losses[step] == pytest.approx(loss, rel=1e-6), step


@pytest.mark.rest
def test_it_changes_nothing_and_gives_up_where_sums_have_no_order(tmp_path):
    losses = []
    for name, every in (("off", 0), ("on", 1)):
        run = Run(tmp_path / name, **{**CHANGES, "train__verify_every": every})
        run.undisturbed()
        losses.append([line["loss"] for line in run.lines()])
    assert losses[0] == losses[1]
    run = Run(tmp_path / "random", **CHANGES)
    done = start(run, "0 1 all")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("warning: train.verify_every: gradients are no longer compared") == 1
