"""Initial parameters: from a Hugging Face folder, any kind of checkpoint, or a .pt file.

The .pt file is a checkpoint of AWS's BERT sample (torch.save of {"model": state dict, ...}) or a
plain state dict. The source must have exactly the names of the model's parameters. Only the heads
for fine-tuning may differ.
"""

import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trnslurm.contract.checkpoints import checkpoint_name
from trnslurm.contract.rundir import CHECKPOINTS
from trnslurm.train.checkpoint.foreign import open_foreign
from trnslurm.train.checkpoint.manifest import CheckpointManifest, is_checkpoint, shorten
from trnslurm.train.checkpoint.reading import OnUse, Parameters, newest_whole, prove
from trnslurm.train.devices.device import say
from trnslurm.train.errors import TrainError

PRETRAINING_HEADS = ("cls.", "lm_head.", "vocab_", "predictions.", "sop_classifier.")
"""Prefixes of the parameters that only pretraining needs, for BERT, RoBERTa and so on."""
POOLER = ".pooler."
"""Part of the names of the layer that summarizes a text. Not every classifier has this layer."""
BEHAVIOUR = ("num_attention_heads", "hidden_act", "layer_norm_eps", "pad_token_id")
"""Keys of config.json that change the model without changing names or shapes of parameters."""


def load_parameters(
    model: nn.Module,
    source: str,
    *,
    asked_by: str = "train.init_from",
    own: Sequence[str] = (),
) -> None:
    """Set every parameter of a transformers model; missing or extra parameters are an error.

    The source is one of these: a Hugging Face folder, a distributed checkpoint, a directory of
    checkpoints (the newest complete one is read), a .pt file, or the name of a model in the local
    Hugging Face cache, because jobs have no network. `own` has the prefixes of the head that the
    job trains. If the source has no such head, the model keeps its new head, and the source's
    pretraining head is left out.
    """
    path = Path(source).expanduser()
    if foreign := open_foreign(path, model):
        found: Mapping[str, Tensor] = foreign
    elif checkpoint := find_checkpoint(path, asked_by):
        if checkpoint[0] != path and os.environ.get("RANK", "0") == "0":
            say(f"initial parameters: {checkpoint[0]}")
        found = Parameters(*checkpoint)
    elif path.suffix == ".pt":
        found = read_state_dict(path)
    else:
        found = _read_folder(model, str(path) if path.is_dir() else source, asked_by)
    if own:
        found = _exchange_heads(model, found, tuple(own), f"{asked_by}: {source}")
    wrong = mismatches(model, found)
    if wrong:
        raise TrainError(f"{asked_by}: {source} does not match the model: {'; '.join(wrong)}")
    with torch.no_grad():
        for name, tensor in {**_persistent(model), **dict(model.named_parameters())}.items():
            tensor.copy_(found.get(name, tensor))


def find_checkpoint(path: Path, asked_by: str) -> tuple[Path, CheckpointManifest] | None:
    """Return the complete checkpoint that a path refers to: itself, or the newest in a directory.

    Return None if the path is neither a checkpoint nor a directory of checkpoints.
    """
    if is_checkpoint(path):
        return path, prove(path)
    if path.name != CHECKPOINTS or not path.is_dir():
        return None
    manifest, damaged = newest_whole(path)
    if manifest is None:
        why = f": {damaged[0][0].name}: {damaged[0][1]}" if damaged else ""
        raise TrainError(f"{asked_by}: {path} has no complete checkpoint{why}")
    return path / checkpoint_name(manifest.step), manifest


def _exchange_heads(
    model: nn.Module, found: Mapping[str, Tensor], own: tuple[str, ...], where: str
) -> Mapping[str, Tensor]:
    """Keep the model's own head; leave out the pretraining head."""
    known = dict(model.named_parameters())
    new = {n: p.data for n, p in known.items() if n not in found and n.startswith(own)}
    others = [name for name in found if name not in known]
    left = [n for n in others if n.startswith(PRETRAINING_HEADS) or POOLER in f".{n}"]
    said = [*_list("new", list(new)), *_list("left out", left)]
    if said and os.environ.get("RANK", "0") == "0":
        say(f"{where}: {'; '.join(said)}")
    return {name: tensor for name, tensor in found.items() if name not in left} | new


def mismatches(model: nn.Module, found: Mapping[str, Tensor]) -> list[str]:
    """Return how named tensors differ from a model's. Tied tensors may be present or missing."""
    wanted = dict(model.named_parameters())
    first = {id(parameter): name for name, parameter in wanted.items()}
    aliases = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in wanted
    }
    buffers, persistent = dict(model.named_buffers()), _persistent(model)
    known = wanted.keys() | aliases.keys() | buffers.keys()
    there = found.shapes if isinstance(found, OnUse) else {n: t.shape for n, t in found.items()}
    shapes = [
        f"{name} has shape {list(there[name])} instead of {list(parameter.shape)}"
        for name, parameter in (persistent | wanted).items()
        if name in found and tuple(there[name]) != parameter.shape
    ]
    others = {name: found[tied] for name, tied in aliases.items() if {name, tied} <= found.keys()}
    others |= {name: buffer for name, buffer in buffers.items() if name not in persistent}
    values = [
        f"{name} differs from {aliases.get(name, 'the model')}"
        for name, other in others.items()
        if name in found and not torch.equal(found[name].cpu(), other.cpu())
    ]
    return [
        *_list("missing", [name for name in wanted if name not in found]),
        *_list("not in the model", [name for name in found if name not in known]),
        *shorten(shapes),
        *shorten(values),
    ]


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a model saves, because a source may have values for them."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _list(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {', '.join(shorten(names))}"] if names else []


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Read a model's tensors from a .pt file, by the names that Hugging Face gives them."""
    try:
        # Workers share the pages of a mapped file; the optimizer's part is never read.
        mapped = zipfile.is_zipfile(file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except (OSError, RuntimeError, EOFError) as error:
        reason = getattr(error, "strerror", None) or f"{error}".partition("\n")[0]
        raise TrainError(f"{file}: cannot be read ({reason or 'it is empty'})") from None
    except Exception:  # a file of another kind raises anything: KeyError, IndexError, ...
        raise TrainError(
            f"{file}: torch.load cannot read it: torch.save did not write it, or it contains more "
            "than tensors and numbers"
        ) from None
    state = content.get("model", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(one, Tensor) for one in state.values()):
        raise TrainError(
            f'{file}: contains no model: expected names and tensors, at the top or under "model"'
        )
    renamed = {_todays_name(name): tensor for name, tensor in state.items()}
    if len(renamed) < len(state):
        raise TrainError(
            f"{file}: two of its names become equal when module. and dense_act are removed"
        )
    return renamed


def _todays_name(name: str) -> str:
    # DistributedDataParallel puts module. before all; NVIDIA's BERT has dense_act where Hugging
    # Face has dense; TensorFlow's BERT had gamma and beta, and so have old files of Hugging Face.
    name = name.removeprefix("module.").replace("dense_act", "dense")
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _read_folder(model: Any, source: str, asked_by: str) -> dict[str, Tensor]:
    # transformers would warn in every worker; here it is one line, or an error.
    for part in ("modeling_utils", "integrations.tensor_parallel"):
        logging.getLogger(f"transformers.{part}").setLevel(logging.ERROR)
    try:
        said, _ = type(model.config).get_config_dict(source, local_files_only=True)
        kind, own = said.get("model_type"), model.config.model_type
        if kind not in (None, own):
            raise TrainError(
                f"{asked_by}: {source} has the type {kind}, but the recipe's model has {own}: "
                "choose another source, or set model.name or model.model_type"
            )
        loaded, report = type(model).from_pretrained(
            source,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise TrainError(
            f"{asked_by}: {source} is neither a model directory nor a model in the local Hugging "
            f"Face cache ({first_line})"
        ) from None
    for key in BEHAVIOUR:
        there, here = (getattr(one.config, key, None) for one in (loaded, model))
        if None not in (there, here) and there != here:
            raise TrainError(
                f"{asked_by}: {source} has {key} {there} in config.json, but model.{key} is {here}"
            )
    missing = set(report["missing_keys"])
    found = {name: value for name, value in loaded.named_parameters() if name not in missing}
    # Unexpected tensors have only a name here; buffers, which older versions saved, do not count.
    left_over = set(report["unexpected_keys"]) - dict(model.named_buffers()).keys()
    return found | {name: torch.empty(0) for name in sorted(left_over)}
