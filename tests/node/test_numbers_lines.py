"""The numbers in the lines of logs; every line here is made up, in a shape that is common."""

from __future__ import annotations

import math

import pytest

from trnslurm.node.numbers.log import LogReader
from trnslurm.node.numbers.sighting import Steps

Seen = dict[int, dict[str, float]]


def read(text: str, first_epoch: int | None = None) -> tuple[Seen, list[int | None]]:
    """The numbers of each step, and the totals."""
    reader, steps = LogReader(first_epoch), Steps()
    for line in text.split("\n"):
        for seen in reader.feed(line):
            steps.add(seen)
    found = steps.take(end=True)
    return {s.step: dict(s.numbers) for s in found}, [s.steps for s in found]


BAR = "|##   |"
LINES = {
    # the step of the training, in words
    "iter 20: loss 3.5000, time 120.01ms, mfu 12.50%": {20: {"loss": 3.5, "mfu": 12.5}},
    "step 00030/21400 (0.14%) | loss: 3.25 | dt: 90.1ms | tok/sec: 524,288 | mfu: 40.0":
        {30: {"loss": 3.25, "tokens_per_s": 524288, "mfu": 40}},
    "step:7/510 train_loss:3.5 train_time:90ms step_avg:12.5ms": {7: {"loss": 3.5}},
    "2026-01-01 - root - INFO - \x1b[31mstep: 40  \x1b[32mloss:  3.25  memory: 4.50GiB(5.5%)":
        {40: {"loss": 3.25, "memory": 4.5}},
    " iteration    120/ 1000 | elapsed (ms): 90.1 | learning rate: 1.5E-04 | lm loss: 3.25E+00 |":
        {120: {"loss": 3.25, "lr": 1.5e-4}},
    "INFO:tensorflow:global step 8: loss = 0.25 (1.5 sec/step)": {8: {"loss": 0.25}},
    "I0101 1 tf_logging.py:115] loss = 1.5, step = 180 (2.3 sec)": {180: {"loss": 1.5}},
    "Finished training step 9. Batch size: 512, Loss: 2.5, LR: 0.5": {9: {"loss": 2.5, "lr": 0.5}},
    "Iter 10: Train loss 2.5, Learning Rate 1.0e-05, It/sec 0.5, Tokens/sec 99.5":
        {10: {"loss": 2.5, "lr": 1e-5, "tokens_per_s": 99.5}},
    "step 6 step_time 4.5s throughput 2.5 seq/s loss 1.5 grad norm 10.5":
        {6: {"loss": 1.5, "throughput": 2.5, "grad_norm": 10.5}},
    "Batch 5 Loss: 2.5, Speed: 16.5 samples/sec, lr: 0.5":
        {5: {"loss": 2.5, "samples_per_s": 16.5, "lr": 0.5}},
    "| epoch 003 | loss 2.5 | ppl 5.6 | num_updates 208 | lr 0.5 | gnorm 0.25 | clip 0% | wall 9":
        {208: {"loss": 2.5, "ppl": 5.6, "lr": 0.5, "grad_norm": 0.25}},
    # a step of an epoch
    "- INFO - Epoch [2][50/100]\tlr: 0.5, eta: 1 day, 2:00:00, time: 0.7, loss_cls: 0.5, loss: 2.5":
        {150: {"lr": 0.5, "loss_cls": 0.5, "loss": 2.5}},
    "Epoch: [0][ 10/500]\tTime 0.3 (1.2)\tLoss 2.5e+00 (2.6e+00)\tAcc@1 1.50 (1.25)":
        {10: {"loss": 2.5, "acc_1": 1.5}},
    "Epoch: [1]  [ 20/500]  eta: 0:10:11  lr: 0.5  loss: 0.75 (0.8)  max mem: 100":
        {20: {"lr": 0.5, "loss": 0.75, "max_mem": 100}},
    "INFO Train: [3/10][80/125]\teta 0:47 lr 0.5\ttime 2.3 (2.4)\tloss 2.5 (2.6)":
        {330: {"lr": 0.5, "loss": 2.5}},
    "epoch 001:     10 / 500 loss=2.5, ppl=5.6, num_updates=10, lr=0.5":
        {10: {"loss": 2.5, "ppl": 5.6, "lr": 0.5}},
    f"Epoch 1:  10%{BAR} 10/100 [00:01<00:09, 9.9it/s, v_num=3, train_loss=2.500]":
        {10: {"loss": 2.5}},
    f"1|52|Loss: 2.25:   0%{BAR} 52/258 [00:24<3:55:01,  1.83it/s]": {52: {"loss": 2.25}},
    # records
    '{"iteration": 19, "total_loss": 2.5, "lr": 0.5}': {19: {"loss": 2.5, "lr": 0.5}},
    "12:00 {'loss': 0.5, 'memory(GiB)': 7.5, 'epoch': 0.2, 'global_step/max_steps': '295/449'}":
        {295: {"loss": 0.5, "memory_gib": 7.5, "epoch": 0.2}},
    '{"epoch": 3, "train_loss": 2.5, "test_acc1": 30.5}':
        {3: {"loss": 2.5, "test_acc1": 30.5, "epoch": 3}},
    # what is held out
    "step:250/510 val_loss:3.5 train_time:90ms": {250: {"eval_loss": 3.5}},
    " validation loss at iteration 100 | lm loss value: 8.5E+00 | lm loss PPL: 3.5E+03 | ":
        {100: {"eval_loss": 8.5, "eval_ppl": 3500}},
    "eval_test: step:   205, accuracy: 0.75, loss: 0.5":
        {205: {"eval_accuracy": 0.75, "eval_loss": 0.5}},
    # an epoch is all that is counted
    "Epoch: 04, Loss: 2.5, Valid accuracy: 50.5%": {4: {"loss": 2.5, "eval_accuracy": 50.5}},
    "Epoch: 04 | Epoch Time: 7m 14s\n\tTrain Loss: 0.25 | Train Acc: 91.5%\n\t Val. Loss: 0.5":
        {4: {"loss": 0.25, "train_acc": 91.5, "eval_loss": 0.5}},
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
        "loss_weight=1.0, step=3, kl_loss_coef: 0.001",
        "Resumed from step 1000, loss 2.3",
        "best val loss 2.1 at step 900",
        "Early stopping: loss 2.1 at step 900",
        "Saving checkpoint at step 100: out/step=100-val_loss=0.32.ckpt",
        "8%|# | 8/100 [00:04<00:41, 2.2it/s][INFO] [loss_scaler.py:181] new loss scale: 32768",
        "Downloading: 45%|####  | 450/1000 [00:10<00:12, 45.0MB/s]",
        "Map: 100%|#####| 5000/5000 [00:10<00:00, 500 examples/s]",
        "| Training Loss | 3.00 | 3.74 | 3.32 |",
        "* Acc@1 85.820 Acc@5 97.868 loss 0.563",  # of which epoch?
        "[0] loss: 10.5",  # a step, or a worker?
        "[1,  2000] loss: 2.5",
        "Epoch: 001/003 | Batch 001/002 | Train/Val Loss: 0.75",
        "training loss: 0.5",
        "Epoch(val) [10][40/48]    eta: 0:06:54  time: 0.5256  memory: 979  ",
        "time (ms) | forward-compute: 352.5 | optimizer: 21.2",
        "[Rank 20] (after 20 iterations) memory (MB) | allocated: 15426.5",
        "***** Eval results *****\nglobal_step = 343\nloss = 0.5",
        "[2026-01-01] [Rank 0] step=1830, skipped=20, lr=[3.2e-08], mom=[(0.9, 0.95)]",
        "model size (500, 32) step 5: torch.Size([2, 3]) lr 0.1",
        "W0101 step 5: gradients are nan; loss scale reduced to 0.5",
        "{'train_runtime': 12.0, 'train_loss': 2.4, 'epoch': 1.0}",
        "0" * 5000,
        "loss " * 2000,
    ],
)
def test_lines_that_say_nothing_sure(text: str) -> None:
    assert read(text)[0] == {}


def test_totals_that_are_stated() -> None:
    assert read("Step 1/100 loss: 2.5")[1] == [100]
    assert read("Epoch [2/5], Step [10/60], Loss: 2.5") == ({70: {"loss": 2.5}}, [300])
    assert read(f"{BAR} 10/100 [00:01<00:09, 9.9it/s, loss=2.5]")[1] == [None]  # of an epoch?


def test_an_exact_name_and_an_evaluation_join_the_step() -> None:
    """The first line has means of several batches."""
    text = "step 0: train loss 4.5, val loss 4.25\niter 0: loss 4.75, mfu -100.00%"
    assert read(text)[0] == {0: {"loss": 4.75, "eval_loss": 4.25, "mfu": -100}}
    text = "iter 10: loss 2.5\nTest set: Average loss: 0.5, Accuracy: 98.5%"
    assert read(text)[0] == {10: {"loss": 2.5, "eval_loss": 0.5, "eval_accuracy": 98.5}}
    assert math.isnan(read("Iteration 220, loss = nan")[0][220]["loss"])


def test_the_lowest_worker_counts() -> None:
    lines = [f"[rank{rank}]: step: 5 loss: {rank}.5" for rank in (3, 1, 0, 2)]
    assert read("\n".join(lines))[0] == {5: {"loss": 0.5}}
    assert read("2: step: 5 loss: 2.5\n2: step: 6 loss: 2.25")[0].keys() == {5, 6}
    # Without ranks, the first of several; a slower worker does not set the steps back.
    assert read("step 5 loss: 2.5\nstep 5 loss: 9.5\nstep 6 loss: 2\nstep 4 loss: 1")[0] == {
        5: {"loss": 2.5},
        6: {"loss": 2.0},
    }


def test_epochs() -> None:
    """A counter begins again in each epoch, or goes on; a resumed run knows the first epoch."""
    text = "Epoch: [{}][ {}/50] Loss 2.5"
    assert [*read("\n".join(text.format(e, i) for e in (0, 1) for i in (10, 50)))[0]] == [
        *(10, 50, 60, 100)
    ]
    goes_on = "Epoch 1 step 40/100 loss: 2\nEpoch 2 step 60/100 loss: 2"
    assert [*read(goes_on)[0]] == [40, 60]
    assert [*read(text.format(3, 10), first_epoch=0)[0]] == [160]
    assert [*read(text.format(3, 10), first_epoch=1)[0]] == [110]
    # Bars without the epoch's name, below a heading, and with a mean over the epoch behind them.
    bars = "\r".join(f"{i}/50 [00:01<00:09, 9.9it/s, loss=2.5]" for i in (25, 50, 25, 50))
    assert [*read(bars)[0]] == [25, 50, 75, 100]
    keras = "50/50 [======] - 1s 5ms/step - loss: 0.5 - val_loss: 0.25"
    text = f"Epoch 1/3\n{keras}\nEpoch 2/3\n{keras}\n10/10 [======] - 1s 5ms/step - loss: 9.0"
    assert read(text)[0] == {n: {"loss": 0.5, "eval_loss": 0.25} for n in (50, 100)}
    assert read("iter 10: loss 2.5\nEpoch 1 done: train loss 3.5")[0] == {10: {"loss": 2.5}}


def test_samples_are_no_steps() -> None:
    """PyTorch's MNIST example counts them; what is left is the epoch, with its latest loss."""
    lines = [f"Train Epoch: {e} [{i}/60000 ({i / 600:.0f}%)]\tLoss: {e}.{i}" for e in (1, 2)
             for i in (0, 640)]  # fmt: skip
    assert read("\n".join(lines))[0] == {1: {"loss": 1.64}, 2: {"loss": 2.64}}
    reader, steps = LogReader(), Steps()
    for seen in reader.feed(lines[0]):
        steps.add(seen)
    assert not steps.take() and not steps.take()  # there may be more of the epoch


def trainer_log(every: int, bars: bool = True, first: bool = False) -> str:
    """What Trainer prints: tqdm clears its bar, writes the record, and draws the bar again."""
    pieces = []
    for step in range(1, 61):
        pieces.append(f"\r  5%{BAR} {step}/60 [00:01<00:09, 9.9it/s]")
        if step % every == 0 or (first and step == 1):
            pieces.append(
                f"\r{' ' * 60}\r{{'loss': {step}.5, 'learning_rate': 0.5, 'epoch': 0.1}}\n"
            )
            pieces.append(f"\r  5%{BAR} {step}/60 [00:01<00:09, 9.9it/s]" if bars else "")
        if step == 40:
            pieces.append(
                f"\r{' ' * 60}\r{{'eval_loss': 7.5, 'eval_runtime': 1.0, 'epoch': 0.1}}\n"
            )
            pieces.append(f"\r  5%{BAR} {step}/60 [00:01<00:09, 9.9it/s]")
    return "".join(pieces)


def test_records_of_trainer_have_the_step_of_its_bar() -> None:
    found, totals = read(trainer_log(20))
    assert {step: numbers["loss"] for step, numbers in found.items()} == {
        20: 20.5,
        40: 40.5,
        60: 60.5,
    }
    assert found[40]["eval_loss"] == 7.5 and found[20]["lr"] == 0.5 and totals == [60] * 3
    assert [*read(trainer_log(20, first=True))[0]] == [1, 20, 40, 60]
    # A log that lacks bars, as stdout in a buffer gives, has no sure steps.
    assert read(trainer_log(7, bars=False))[0].keys() <= {40}
    trimmed = (
        "{'loss': 1.5, 'epoch': 0.1}\n 25/100 [00:01<00:09, 9.9it/s]\n{'loss': 2.5, 'epoch': 0.2}\n"
    )
    assert read(f"{trimmed}{{'loss': 3.5, 'epoch': 0.3}}\n 55/100 [00:01<00:09, 9.9it/s]")[0] == {}
