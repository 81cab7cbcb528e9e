"""Reinforcement learning with servers on their own nodes: GRPO on a tiny policy.

    trnslurm submit ./train.py --nodes 2 \
        --set 'roles.rollout.command=[python, serve.py, "{port}", sample]' \
        --set 'roles.rollout.nodes=2' --set 'roles.rollout.ready=http://{host}:{port}/' \
        --set 'roles.reward.command=[python, serve.py, "{port}", reward]' \
        -- --rollout {rollout.urls} --reward {reward.url} --out {checkpoints} --resume {resume}

The rollout servers sample sequences from the policy, the reward server rates them, and the workers
learn to count. A request contains everything that a server needs. If you kill a server, it is
started again, the workers repeat the request, and the losses stay the same.
"""

import argparse
import json
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist

import trnslurm

TOKENS, LENGTH, SAMPLES, LR = 8, 9, 32, 2.0


def ask(url: str, **what: object) -> list:
    """Ask a server, and repeat the request while it is unavailable."""
    while True:
        try:
            with urllib.request.urlopen(url, json.dumps(what).encode(), timeout=60) as answer:
                return json.load(answer)
        except OSError as error:
            print(f"asks {url} again: {error}", flush=True)
            time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollout", type=lambda urls: urls.split(","), required=True)
    parser.add_argument("--reward", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    done, logits = 0, torch.zeros(TOKENS, TOKENS)
    if options.resume:
        done, logits = torch.load(options.resume, weights_only=True)
    logits.requires_grad_()
    for step in range(done + 1, options.steps + 1):
        number = step * workers + rank  # every group of samples has a seed of its own
        policy = {"logits": logits.tolist(), "seed": number, "samples": SAMPLES, "length": LENGTH}
        sequences = ask(options.rollout[number % len(options.rollout)], **policy)
        rewards = torch.tensor(ask(options.reward, sequences=sequences, tokens=TOKENS))

        better = (rewards - rewards.mean()) / (rewards.std() + 1e-6)  # than the rest of its group
        ids = torch.tensor(sequences)
        chosen = logits.log_softmax(-1)[ids[:, :-1], ids[:, 1:]].mean(-1)
        (-(better * chosen).mean()).backward()
        mean = rewards.mean()
        for value in (logits.grad, mean):
            dist.all_reduce(value)
        with torch.no_grad():
            logits -= LR / workers * logits.grad
            logits.grad = None
        reward = mean.item() / workers
        trnslurm.report(step=step, steps=options.steps, loss=1 - reward, reward=reward)

        stops = trnslurm.should_stop()
        if rank == 0 and (stops or step % 10 == 0 or step == options.steps):
            path = options.out / f"{step}.pt"
            torch.save((step, logits.detach()), path)
            trnslurm.saved(step, path)
        if stops:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
