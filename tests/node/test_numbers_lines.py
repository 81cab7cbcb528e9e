"""The numbers in the lines of logs; every line here is made up, in a shape that is common."""

from __future__ import annotations

import math

import pytest

from trnslurm.node.numbers.log import Earlier, LogReader
from trnslurm.node.numbers.sighting import Steps

Seen = dict[int, dict[str, float]]


def read(text: str) -> tuple[Seen, list[int | None]]:
    """The numbers of each step, and the totals."""
    reader, steps = LogReader(), Steps()
    for line in text.split("\n"):
        for seen in reader.feed(line):
            steps.add(seen)
    found = steps.take(end=True)
    return {s.step: dict(s.numbers) for s in found}, [s.steps for s in found]


BAR = "10%|##   |"
LINES = {
    "iter 20: loss 3.5000, time 120.01ms, mfu 12.50%": {20: {"loss": 3.5, "mfu": 12.5}},
    "step 00030/21400 (0.14%) | loss: 3.25 | dt: 90.1ms | tok/sec: 524,288 | mfu: 40.0":
        {30: {"loss": 3.25, "tokens_per_s": 524288, "mfu": 40}},
    "step:7/510 train_loss:3.5 train_time:90ms step_avg:12.5ms": {7: {"loss": 3.5}},
    "2026-01-01 - root - INFO - \x1b[31mstep: 40  \x1b[32mloss:  3.25  memory: 4.50GiB(5.5%)":
        {40: {"loss": 3.25}},
    " iteration    120/ 1000 | elapsed (ms): 90.1 | learning rate: 1.5E-04 | lm loss: 3.25E+00 |":
        {120: {"loss": 3.25, "lr": 1.5e-4}},
    "INFO:tensorflow:global step 8: loss = 0.25 (1.5 sec/step)": {8: {"loss": 0.25}},
    "I0101 1 tf_logging.py:115] loss = 1.5, step = 180 (2.3 sec)": {180: {"loss": 1.5}},
    "Finished training step 9. Batch size: 512, Loss: 2.5, LR: 0.5": {9: {"loss": 2.5, "lr": 0.5}},
    "Iter 10: Train loss 2.5, Learning Rate 1.0e-05, It/sec 0.5":
        {10: {"loss": 2.5, "lr": 1e-5}},
    "step 6 step_time 4.5s throughput 2.5 seq/s loss 1.5 grad norm 10.5":
        {6: {"loss": 1.5, "grad_norm": 10.5}},
    "step: 19, total_loss: 9.5, mlm_loss: 8.5, nsp_loss: 1.0": {19: {"loss": 9.5}},
    "| epoch 003 | loss 2.5 | ppl 5.6 | num_updates 208 | lr 0.5 | gnorm 0.25 | wall 9":
        {208: {"loss": 2.5, "lr": 0.5, "grad_norm": 0.25}},
    f"Steps: {BAR} 12/500 [00:24<3:55:01,  1.83it/s, loss=2.25, lr=0.5]":
        {12: {"loss": 2.25, "lr": 0.5}},
    '{"iteration": 19, "total_loss": 2.5, "lr": 0.5}': {19: {"loss": 2.5, "lr": 0.5}},
    "12:00 {'loss': 0.5, 'memory(GiB)': 7.5, 'epoch': 0.2, 'global_step/max_steps': '295/449'}":
        {295: {"loss": 0.5}},
}  # fmt: skip


@pytest.mark.parametrize("text", LINES)
def test_numbers_of_a_step(text: str) -> None:
    assert read(text)[0] == LINES[text]


@pytest.mark.parametrize(
    "text",
    [
        "Namespace(lr=0.1, loss='ce', steps=1000, label_smoothing=0.1)",
        "python train.py --lr 0.1 --loss-weight 0.5 --step 100",
        "config: {'loss': 0.5, 'step': 3}",
        '"steps":  [{"step": 1, "loss": 1.234, "grad_norm": 0.567}, ...]',
        "loss_weight=1.0, step=3, kl_loss_coef: 0.001",
        "step 5: mlm loss 2.5",
        "step 5: g_loss: 2.5 d_loss: 0.5",
        "step 5, loss[loss=1.5, over 2 frames], tot_loss[loss=0.5, over 22192 frames]",
        "In step 2, loss = 0.5",
        "100 ms per step 5, loss 0.5",
        "Resumed from step 1000, loss 2.3",
        "best loss 2.1 at step 900",
        "step:250/510 val_loss:3.5 train_time:90ms",
        "step 0: train loss 4.5, val loss 4.25",
        "{'eval_loss': 7.5, 'eval_runtime': 1.0, 'step': 5}",
        # a step of an epoch, or an epoch
        "Epoch [2][50/100]\tlr: 0.5, loss: 2.5",
        "Epoch 3 step 40/100 loss: 2.5",
        '{"epoch": 3, "step": 5, "loss": 2.5}',
        "Epoch: 04, Loss: 2.5",
        "Train Epoch: 3 [640/60000 (1%)]\tLoss: 2.5",
        "Epoch 3\nstep 40: loss 2.5",
        # of what?
        "[0] loss: 10.5",
        "Batch 5 Loss: 2.5",
        "training loss: 0.5",
        f"{BAR} 10/100 [00:01<00:09, 9.9it/s, loss=2.5]",
        f"Map: {BAR} 5000/50000 [00:10<00:00, loss=2.5]",
        "{'train_runtime': 12.0, 'train_loss': 2.4, 'epoch': 1.0}",
        "step 5: gradients are nan; loss scale reduced to 0.5",
        "0" * 5000,
        "loss " * 2000,
        "step 1 " * 2000,
    ],
)
def test_lines_that_say_nothing_sure(text: str) -> None:
    assert read(text)[0] == {}


def test_the_total_is_the_one_that_is_stated() -> None:
    assert read("Step 1/100 loss: 2.5")[1] == [100]
    assert math.isnan(read("Iteration 220, loss = nan")[0][220]["loss"])


def test_one_worker_counts() -> None:
    """The first that names itself; what is seen first of a step stays."""
    lines = [f"[rank{rank}]: step: {step} loss: {rank}.5" for step in (5, 4) for rank in (1, 0)]
    assert read("\n".join(lines[:2]))[0] == {5: {"loss": 1.5}}
    assert read("step 5 loss: 2.5\nstep 5 loss: 9.5")[0] == {5: {"loss": 2.5}}


def test_no_line_counts_behind_a_contradiction() -> None:
    text = "step 5 loss: 2.5\nstep 6 loss: 2\nstep 5 loss: 1.5\nstep 7 loss: 1"
    assert [*read(text)[0]] == [5, 6]


def trainer_log(every: int, bars: bool = True, first: bool = False) -> str:
    """What Trainer prints: tqdm clears its bar, writes the record, and draws the bar again."""
    pieces = []
    for step in range(1, 61):
        pieces.append(f"\r {BAR} {step}/60 [00:01<00:09, 9.9it/s]")
        if step % every == 0 or (first and step == 1):
            pieces.append(
                f"\r{' ' * 60}\r{{'loss': {step}.5, 'learning_rate': 0.5, 'epoch': 0.1}}\n"
            )
            pieces.append(f"\r {BAR} {step}/60 [00:01<00:09, 9.9it/s]" if bars else "")
        if step == 40:
            pieces.append(
                f"\r{' ' * 60}\r{{'eval_loss': 7.5, 'eval_runtime': 1.0, 'epoch': 0.1}}\n"
            )
            pieces.append(f"\r {BAR} {step}/60 [00:01<00:09, 9.9it/s]")
    return "".join(pieces)


def test_records_of_trainer_have_the_step_of_its_bar() -> None:
    found, totals = read(trainer_log(20))
    assert found == {n: {"loss": n + 0.5, "lr": 0.5} for n in (20, 40, 60)} and totals == [60] * 3
    assert [*read(trainer_log(20, first=True))[0]] == [1, 20, 40, 60]
    # A log that lacks bars, as stdout in a buffer gives, has no sure steps.
    assert read(trainer_log(7, bars=False))[0] == {}
    bar = f"{BAR} {{}}/100 [00:01<00:09, 9.9it/s]\n"
    trimmed = f"{{'loss': 1.5, 'epoch': 0.1}}\n{bar.format(25)}{{'loss': 2.5, 'epoch': 0.2}}\n"
    assert read(f"{trimmed}{{'loss': 3.5, 'epoch': 0.3}}\n{bar.format(55)}")[0] == {}


def test_steps_that_grow_over_epochs_count_the_whole_training() -> None:
    line = "Epoch: {}, step: {}, loss: {}.5, avg loss: 9.5"
    steps = [(0, 25), (0, 50), (1, 75), (2, 100), (2, 125)]
    told = [line.format(epoch, step, step) for epoch, step in steps]
    assert read("\n".join(told[:3]))[0] == {}
    assert read("\n".join(told))[0] == {step: {"loss": step + 0.5} for _, step in steps}
    again = [line.format(epoch, step, step) for epoch in range(4) for step in (25, 50)]
    assert read("\n".join(again))[0] == {}


def bars(label: str, places: list[tuple[int, int, float]], form: str = "loss={:.2f}") -> str:
    """Bars as tqdm draws them: with the loss of the batch before, and then with its own."""
    pieces, old = [], 9.0
    for epoch, at, loss in places:
        for shown in (old, loss):
            what, now = label.format(epoch=epoch, loss=shown), form.format(shown)
            pieces.append(f"\r{what}: {BAR} {at}/4 [00:01<00:09, 9.9it/s, {now}]")
        old = loss
    return "".join(pieces)


PLACES = [(epoch, at, epoch + at / 4) for epoch in range(3) for at in range(5)]
COUNTED = {epoch * 4 + at: {"loss": epoch + at / 4} for epoch, at, _ in PLACES if at}


@pytest.mark.parametrize(
    ("label", "form"),
    [
        ("Epoch {epoch}", "v_num=0, loss={:.2f}"),
        ("Epoch {epoch}/3", "{{'loss': {:.2f}, 'lr': '1e-4'}}"),
        ("loss: {loss:.2f}", "x=1"),
        ("Training Epoch [{epoch}/3], loss {loss:.2f}", "x=1"),
    ],
)
def test_batches_of_bars_are_counted_over_epochs(label: str, form: str) -> None:
    found, totals = read(bars(label, PLACES, form))
    last = max(COUNTED)  # what a bar shows last may be the loss of the batch before
    assert {n: {"loss": v["loss"]} for n, v in found.items()} == {
        n: v for n, v in COUNTED.items() if n != last
    }
    assert set(totals) == {None}


def test_bars_that_say_nothing_sure() -> None:
    for label in ("Epochs", "Validation {epoch}", "Batch {epoch}", "d_loss: {loss:.2f}"):
        assert read(bars(label, PLACES))[0] == {}
    # the bars of two workers, one still in the epoch before
    text = bars("Epoch {epoch}", [(0, 4, 1.0), (1, 1, 2.0), (0, 4, 1.0), (1, 2, 3.0), (1, 3, 4.0)])
    assert [*read(text)[0]] == [4, 5, 6]
    assert read(bars("Epoch {epoch}", [(5, 1, 1.0), (5, 2, 2.0)]))[0] == {}  # it resumed
    steps = f"Steps: {BAR} 12/500 [00:24<3:55:01,  1.83it/s, {{'loss': 2.25}}]"
    assert read(steps)[0] == {12: {"loss": 2.25}}


def epochs(text: str) -> tuple[dict[int, float], list[int | None]]:
    """The loss of each step that is an epoch, and the totals; nothing if the log names steps."""
    reader = LogReader()
    for line in text.split("\n"):
        assert not [*reader.feed(line)]
    found = reader.epochs.take(end=True)
    return {seen.step: seen.numbers["loss"] for seen in found}, [seen.steps for seen in found]


@pytest.mark.parametrize(
    "form",
    [
        "Epoch {0}/3: train loss: {1}, val loss: 9.5",
        "epoch: {0}, lr: 1.00e+00 - train loss: {1} - valid loss: 9.5, valid error: 0.5",
        "Epoch: 00{0}, Loss: {1}, Val: 0.5, Test: 0.5",
        "====> Epoch: {0} Average loss: {1}",
        "Epoch {0}/3\n 9/9 [====] - 5s 3ms/step - loss: {1} - acc: 0.5 - val_loss: 9.5",
        "Train Epoch: {0} [0/60000 (0%)]\tLoss: 9.5\n"
        "Train Epoch: {0} [640/60000 (1%)]\tLoss: {1}\nTest set: Average loss: 9.5",
        "Epoch {0}\n-----\ntrain Loss: {1} Acc: 0.5\nval Loss: 9.5 Acc: 0.5\nBest val loss: 9.5",
        "loss: 9.5\nEpoch {0} started\nbatch loss 9.5\ntraining loss = {1}",
    ],
)
def test_a_loss_per_epoch(form: str) -> None:
    text = "\n".join(form.format(epoch, f"{epoch}.25") for epoch in (1, 2, 3))
    assert epochs(text)[0] == {1: 1.25, 2: 2.25, 3: 3.25}
    # Counted from 0, an epoch is the next step.
    text = "\n".join(form.format(epoch, f"{epoch}.25") for epoch in (0, 1, 2))
    assert epochs(text)[0] == {1: 0.25, 2: 1.25, 3: 2.25}


def test_an_epoch_counts_when_its_loss_is_certain() -> None:
    line = "Epoch {}/9, loss: {}.5"
    assert epochs(line.format(1, 1))[0] == {}
    assert epochs("\n".join(line.format(n, n) for n in (1, 2)))[1] == [9, 9]
    # The last epoch was cut off.
    assert epochs("\n".join(line.format(n, m) for n, m in ((1, 1), (1, 2), (2, 3))))[0] == {1: 2.5}
    # Another worker is behind.
    assert epochs("\n".join(line.format(n, n) for n in (1, 2, 1, 3)))[0] == {1: 1.5, 2: 2.5}


@pytest.mark.parametrize(
    "form",
    ["Epoch [{0}/3], Step [{1}/600], Loss: {2}", "Epoch: [{0}][ {1}/600]\tTime 1.5\tLoss {2} (9.5)",
     "Epoch {0} | batch {1}/600 | loss {2}"],
)  # fmt: skip
def test_places_in_epochs_become_steps_of_the_run(form: str) -> None:
    told = [form.format(epoch, at, f"{at}.5") for epoch in (1, 2) for at in (100, 400)]
    found = {100: 100.5, 400: 400.5, 700: 100.5, 1000: 400.5}
    steps = read("\n".join(told))[0]
    assert {step: numbers["loss"] for step, numbers in steps.items()} == found
    assert [numbers["epoch"] for numbers in steps.values()] == [1, 1, 2, 2]
    # A later attempt goes on if its predecessor has read where the first epoch was.
    reader = LogReader(Earlier(1, restarts=True))
    assert [seen.step for line in told[2:] for seen in reader.feed(line)] == [700, 1000]
    assert not [seen for line in told[2:] for seen in LogReader(Earlier()).feed(line)]
    # Steps that do not restart count the whole run.
    told = [form.format(epoch, at, 1.5) for epoch, at in ((0, 100), (0, 200), (1, 300), (2, 400))]
    assert [*read("\n".join(told))[0]] == [100, 200, 300, 400]
