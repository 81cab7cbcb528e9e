"""Classifiers of texts, or of the words in them: data, initial parameters, logits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trnslurm.train.checkpoint.pretrained import load_parameters
from trnslurm.train.data.labelled import Labelled, LabelledSamples, open_labelled
from trnslurm.train.data.units import Unit
from trnslurm.train.devices.device import Device
from trnslurm.train.encoders import make_config, new_classifier, positions
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.progress import count_parameters, transformer_flops
from trnslurm.train.plan import JobPlan

_HEADS = ("classifier.", "pre_classifier.")
"""Prefixes of the parameters that belong to the classification head, in all architectures."""


def open_split(plan: JobPlan, split: str, *, of_words: bool = False) -> Labelled:
    """Open a split of the labelled training data if it fits the plan's model."""
    if (longest := positions(plan.model)) < plan.seq_len:
        raise TrainError(
            f"seq_len is {plan.seq_len}, but with model.max_position_embeddings="
            f"{plan.model['max_position_embeddings']} a {plan.model['model_type']} reads at most "
            f"{longest} tokens"
        )
    text = open_labelled(
        Path(plan.data).expanduser(),
        split,
        seq_len=plan.seq_len,
        vocab_size=plan.model["vocab_size"],
        seed=plan.seed,
        pad_id=plan.model.get("pad_token_id"),
    )
    if text.of_words != of_words:
        has = "each word: train bert_ner" if text.of_words else "each text: train bert_mrpc"
        raise TrainError(f"{plan.data} has a label for {has} on this data")
    if text.num_outputs != plan.model["num_labels"]:
        raise TrainError(
            f"model.num_labels is {plan.model['num_labels']}, but {plan.data} has "
            f"{', '.join(text.labels) or 'numbers on a scale'}: "
            f"set model.num_labels={text.num_outputs}"
        )
    return text


def make_classifier(
    plan: JobPlan, init_from: str, device: Device, *, of_words: bool = False
) -> Any:
    """Create a classifier with a new head, which the seed makes the same on every worker."""
    # The mask of PyTorch's fused attention depends on its values, which an XLA graph cannot.
    attention = "eager" if device.torch_device.type == "xla" else "sdpa"
    torch.manual_seed(plan.seed)
    model = new_classifier(make_config(plan.model, attn_implementation=attention), of_words)
    if init_from:
        load_parameters(model, init_from, own=_HEADS)
    model.to(
        device=device.torch_device,
        dtype=torch.bfloat16 if plan.precision == "bf16" else torch.float32,
    )
    device.compile_layers(model)
    return model


def predict(model: Any, device: Device, precision: str, samples: LabelledSamples) -> Tensor:
    """Return the logits of samples that are on the device."""
    # DistilBERT has no segments, and RoBERTa only one.
    segments = getattr(model.config, "type_vocab_size", 0) > 1
    pairs = {"token_type_ids": samples.token_type_ids} if segments else {}
    with device.autocast(precision):
        output = model(input_ids=samples.input_ids, attention_mask=samples.attention_mask, **pairs)
    logits: Tensor = output.logits.float()
    return logits


def read_unit(device: Device, text: Labelled, unit: Unit) -> LabelledSamples:
    """Read a unit's samples, and copy them to the device."""
    with device.timer("data"):
        return on_device(device, text.samples(unit.first, unit.size))


def on_device(device: Device, samples: LabelledSamples) -> LabelledSamples:
    """Copy samples to the device."""
    return LabelledSamples(*device.put_all(samples))


def classifier_flops(model: Any, seq_len: int) -> float:
    """Count the FLOP to train a classifier on one sample, without embeddings and head."""
    base: Any = model.base_model
    if model.config.model_type == "distilbert":
        parameters = count_parameters(base.transformer)
    elif model.config.model_type == "albert":  # its layers share parameters, but not the work
        again = model.config.num_hidden_layers // model.config.num_hidden_groups
        parameters = count_parameters(base.encoder.albert_layer_groups) * again
    else:
        parameters = count_parameters(base.encoder)
    return transformer_flops(parameters, model.config, seq_len)
