"""Train Llama 3 on text, sharded over all workers. In a run directory, on each node:

    python -m torch.distributed.run --nproc_per_node 2 code/jobs/llama3_clm/train.py plan.json

plan.json holds every number, and strategy.json what is particular to the strategy that it names.
TRNSLURM_PHASE=precompile runs a few steps, only to see every graph.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import no_init_weights
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import is_flash_attn_2_available

from trnslurm.train.checkpoint import Checkpoints, open_checkpoints
from trnslurm.train.data.text import Text, open_text
from trnslurm.train.data.units import Unit, eval_units, worker_units
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import Environment, read_environment
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.agreement import conclude_sharded
from trnslurm.train.loop.job import check_world, run_job
from trnslurm.train.loop.progress import Progress, transformer_flops
from trnslurm.train.loop.schedule import SaveTimes, due, learning_rate, steps_to_run, total_steps
from trnslurm.train.loop.supervision import Supervision
from trnslurm.train.plan import Plan, describe_plan, parse_plan, read_settings
from trnslurm.train.say import say
from trnslurm.train.sharded import Sharded, ShardedSettings, shard_model

ATTENTIONS = ("auto", "sdpa", "flash_attention_2", "eager")
RATES = {"tokens/s": "tokens_per_s", "per device": "tokens_per_s_per_device"}


@dataclass(frozen=True, kw_only=True)
class Settings(ShardedSettings):
    """The recipe's train section."""

    attention: str


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loop works with."""

    plan: Plan
    settings: Settings
    config: LlamaConfig
    steps: int
    """Of the whole training, however many runs it takes: the schedule ends there."""
    device: Device
    text: Text
    held_out: Text
    sharded: Sharded
    checkpoints: Checkpoints


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    plan = parse_plan("Train Llama 3 on text, sharded over all workers.")
    settings = read_settings(Settings, plan, not_zero=("log_every", "eval_samples"))
    environment = read_environment()
    device = open_device(plan.device, environment)
    check_world(plan, device)

    run = make_training(plan, settings, device, environment)
    if device.rank == 0:
        say(describe(run, environment))
    supervision = run_training(run, environment)
    device.close()
    supervision.note_stop()


def run_training(run: Training, environment: Environment) -> Supervision:
    """Train to the end, or as far as this run shall go."""
    plan, device = run.plan, run.device
    done = run.checkpoints.resume(run.sharded)
    steps = steps_to_run(environment, done=done, stop_at=run.settings.stop_at, steps=run.steps)
    saves = SaveTimes(run.settings, last=steps.stop)
    progress = Progress(
        plan,
        environment,
        device,
        steps=steps,
        log_every=run.settings.log_every,
        flops_per_sample=transformer_flops(run.sharded.num_parameters, run.config, plan.seq_len),
        rates=RATES,
        ask=saves.overdue,
    )

    # Go!
    with Supervision(run.plan, run.settings, device, environment, progress) as supervision:
        train(run, progress, saves, supervision)

    run.checkpoints.require_last()
    progress.close()
    if not supervision.stopped:  # or every second may count
        conclude_sharded(device, same_loss(run), environment)
    return supervision


def train(run: Training, progress: Progress, saves: SaveTimes, supervision: Supervision) -> None:
    """Run the steps. Each call of device.sync() ends one graph: a unit's, or the optimizer's."""
    plan, settings, device, steps = run.plan, run.settings, run.device, progress.steps
    valid_tokens = plan.batch.global_batch * predicted_tokens(plan)
    loss_sum = device.put(torch.zeros(1))
    run.sharded.model.train()
    for step in steps:
        for unit in worker_units(plan, worker=device.rank, step=step):
            loss = unit_loss(run, run.text, unit, valid_tokens)
            run.sharded.backward(loss)
            loss_sum += loss.detach()
            device.sync()

        lr = learning_rate(settings, step=step, steps=run.steps)
        grad_norm = run.sharded.step(lr)
        step_loss = loss_sum.clone()
        loss_sum.zero_()
        run.sharded.zero_grad()
        device.sync()

        done = step + 1
        evaluated = {}
        # After the first step as well, so that its graph does not come as a surprise later.
        if due(settings.eval_every, done, also=(steps.start + 1, steps.stop)):
            evaluated = evaluate(run)
        overdue = progress.note(done, loss=step_loss, grad_norm=grad_norm, lr=lr, **evaluated)
        stops = supervision.step_done(done)
        if saves.due(done, overdue=overdue or stops):
            progress.report()
            samples = done * plan.batch.global_batch
            run.checkpoints.save(step=done, samples=samples, optimizer=run.sharded)
        run.checkpoints.poll()
        if stops:
            break


def evaluate(run: Training) -> dict[str, float]:
    """Give the mean loss on the first samples of the held-out text, whatever the worker count."""
    samples = run.settings.eval_samples
    units = eval_units(run.plan, worker=run.device.rank, samples=samples)
    with run.device.timer("eval"):
        mine = loss_of(run, run.held_out, units, samples)
        [loss] = run.device.total(mine.tolist())
    return {"eval_loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def same_loss(run: Training) -> Tensor:
    """Give the loss on one unit, which every worker computes with the parameters it gathers."""
    size = run.plan.batch.micro_batch
    return loss_of(run, run.text, [Unit(index=0, first=0, size=size, weight=1.0, seed=0)], size)


@torch.no_grad()
def loss_of(run: Training, text: Text, units: list[Unit], samples: int) -> Tensor:
    """Give this worker's share of the mean loss on so many samples, without learning from them."""
    loss_sum = run.device.put(torch.zeros(1))
    run.sharded.model.eval()
    for unit in units:
        loss_sum += unit_loss(run, text, unit, samples * predicted_tokens(run.plan))
        run.device.sync()
    run.sharded.model.train()
    return loss_sum


def predicted_tokens(plan: Plan) -> int:
    """Count the tokens of a sample that are predicted: packed text has no padding, but a first."""
    return plan.seq_len - 1


def unit_loss(run: Training, text: Text, unit: Unit, valid_tokens: int) -> Tensor:
    """Give a unit's share of the mean loss over so many tokens."""
    device = run.device
    with device.timer("data"):
        tokens = device.put(text.samples(unit.first, unit.size))
    # A vector, because torch_xla compiles a 0-dimensional tensor of exactly 0 or 1 into the graph.
    weight = device.put(torch.tensor([unit.weight / valid_tokens]))
    device.seed(unit.seed)
    logits = run.sharded.model(tokens, use_cache=False).logits
    targets = tokens[:, 1:].flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum") * weight


def make_training(
    plan: Plan, settings: Settings, device: Device, environment: Environment
) -> Training:
    """Make what the loop works with, on the device."""
    text = open_split(plan, "train")
    config = LlamaConfig(**plan.model)
    config._attn_implementation = choose_attention(settings.attention, device)
    sharded = shard_model(
        plan,
        settings,
        device,
        environment.run_dir,
        lambda: make_model(config),
        std=config.initializer_range,
    )
    device.sync()
    checkpoints = open_checkpoints(plan, settings, device, environment, data=text.fingerprint)
    return Training(
        plan=plan,
        settings=settings,
        config=config,
        steps=total_steps(plan, epochs=settings.epochs, samples_per_epoch=text.num_blocks),
        device=device,
        text=text,
        held_out=open_split(plan, "eval") if settings.eval_every else text,
        sharded=sharded,
        checkpoints=checkpoints,
    )


def open_split(plan: Plan, split: str) -> Text:
    """Open a split of the text to train on: the job's own unless the plan names one."""
    path = Path(plan.data).expanduser() if plan.data else Path(__file__).with_name("text.txt")
    text = open_text(path, split=split, seq_len=plan.seq_len, seed=plan.seed)
    vocabulary, positions = plan.model["vocab_size"], plan.model["max_position_embeddings"]
    if vocabulary < text.vocab_size:
        raise TrainError(f"model.vocab_size is {vocabulary}: {path} needs {text.vocab_size}")
    if positions < plan.seq_len:
        raise TrainError(
            f"seq_len is {plan.seq_len}, but model.max_position_embeddings only {positions}"
        )
    return text


def make_model(config: LlamaConfig) -> LlamaForCausalLM:
    """Make a Llama wherever PyTorch is told to make tensors; the parameters' values come later."""
    with no_init_weights():
        model = LlamaForCausalLM(config)
    # The frequencies of positions are the only values that nothing brings later. As a plain tensor
    # and no buffer they stay: those a strategy moves to no memory, or rounds to bf16 (torch_xla's
    # buffer_dtype), in which positions above some hundreds would not be what they are.
    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    frequencies = rotary.inv_freq
    del rotary.inv_freq
    rotary.inv_freq = frequencies
    model.model.rotary_emb = rotary
    return model


def choose_attention(name: str, device: Device) -> str:
    """Take what is asked for, or by itself PyTorch's fused attention where there is one."""
    if name not in ATTENTIONS:
        raise TrainError(f"train.attention: {name!r} is not one of {', '.join(ATTENTIONS)}")
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        raise TrainError(
            "train.attention: flash_attention_2 needs a GPU and the package flash-attn in the "
            "nodes' Python: install it, or set train.attention=auto"
        )
    if name == "auto":
        return "eager" if device.torch_device.type == "xla" else "sdpa"
    return name


def describe(run: Training, environment: Environment) -> str:
    """Say in one block what is about to run."""
    plan, settings, text = run.plan, run.settings, run.text
    tokens = plan.batch.global_batch * plan.seq_len
    return f"""\
{describe_plan(plan, environment)}
  model   {run.sharded.num_parameters:,} parameters, {settings.init_from or "new"}, \
{plan.precision}, {settings.optimizer}
  shards  {settings.strategy}, attention {run.config._attn_implementation}
  data    {text.num_tokens:,} tokens in {text.num_blocks:,} blocks of {plan.seq_len}
  steps   {run.steps:,} of {tokens:,} tokens each"""


if __name__ == "__main__":
    run_job(main)
