"""Parameters from other libraries' checkpoints: torch.distributed.checkpoint and trnslurm.save.

    .metadata, __0_0.distcp, …       FileSystemWriter: plain FSDP2, accelerate, torchtitan
    shard-00001-model-….safetensors  HuggingFaceStorageWriter with save_distributed
    manifest.json, rank-….safetensors    trnslurm.save

Any number of workers may have written them. Of each tensor, only the pieces with the required rows
are read. `.metadata` is a pickle, so only the classes that PyTorch writes into it are instantiated.
"""

import io
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from trnslurm.contract.checkpoints import checkpoints_in
from trnslurm.contract.files import open_file, read_file
from trnslurm.contract.rundir import CHECKPOINTS
from trnslurm.saves.manifest import (
    NAME,
    OF_SCRIPTS,
    DamagedError,
    check_files,
    hash_files,
    unsealed,
)
from trnslurm.saves.pieces import Files, Part
from trnslurm.train.checkpoint.reading import OnUse
from trnslurm.train.checkpoint.state import num_rows
from trnslurm.train.errors import TrainError

_INDEX = ".metadata"
_MOST_INDEX = 1 << 30
# torch/distributed/checkpoint/metadata.py and filesystem.py, torch 2.4 to 2.14; a storage_meta
# names its directory.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(f"{kind}{bits}" for kind, bits in (
        *(("float", bits) for bits in (16, 32, 64)), *(("int", bits) for bits in (8, 16, 32, 64)),
        *(("uint", bits) for bits in (8, 16, 32, 64)), ("bfloat", 16), ("complex", 64),
        ("complex", 128), ("bool", ""), ("float8_", "e4m3fn"), ("float8_", "e5m2"),
    ))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}  # fmt: skip

# torchtitan/models/llama3/state_dict_adapter.py, 0.3.0; before, without qkv_linear and with output.
_OF_TORCHTITAN = (
    (r"model\.embed_tokens\.weight", ("tok_embeddings.weight",)),
    (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.weight",
     (r"layers.\1.attention.qkv_linear.w\2.weight", r"layers.\1.attention.w\2.weight")),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight", (r"layers.\1.attention.wo.weight",)),
    (r"model\.layers\.(\d+)\.mlp\.gate_proj\.weight", (r"layers.\1.feed_forward.w1.weight",)),
    (r"model\.layers\.(\d+)\.mlp\.up_proj\.weight", (r"layers.\1.feed_forward.w3.weight",)),
    (r"model\.layers\.(\d+)\.mlp\.down_proj\.weight", (r"layers.\1.feed_forward.w2.weight",)),
    (r"model\.layers\.(\d+)\.input_layernorm\.weight", (r"layers.\1.attention_norm.weight",)),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.weight", (r"layers.\1.ffn_norm.weight",)),
    (r"model\.norm\.weight", ("norm.weight",)),
    (r"lm_head\.weight", ("lm_head.weight", "output.weight")),
)  # fmt: skip


class Foreign(OnUse):
    """A model's parameters in another library's checkpoint, by the model's names."""

    def __init__(self, tensors: "_Tensors", model: nn.Module, source: Path) -> None:
        self._tensors = tensors
        self._heads = {
            "q": getattr(getattr(model, "config", None), "num_attention_heads", 0),
            "k": getattr(getattr(model, "config", None), "num_key_value_heads", 0),
        }
        wanted = [name for name, _ in model.named_parameters()]
        self._names, self._turned = _match(tensors.shapes, wanted)
        if not self._names:
            there = sorted(tensors.shapes)
            raise TrainError(
                f"{source} has none of the model's parameters: it has {', '.join(there[:3])}, …, "
                f"but the model has {wanted[0]}, …"
            )
        self.shapes = {name: tensors.shapes[saved] for name, saved in self._names.items()}

    def read(self, name: str, kind: str, rows: range) -> Tensor:
        """Return some of a parameter's rows. Other kinds are not available."""
        saved = self._names[name]
        turned = re.search(r"self_attn\.([qk])_proj", name) if self._turned else None
        if not turned:
            return self._tensors.rows(saved, rows)
        heads, shape = self._heads[turned[1]], self._tensors.shapes[saved]
        whole = self._tensors.rows(saved, range(shape[0]))
        # torchtitan's rotary embedding turns neighbors, transformers' the halves of a head.
        paired = whole.view(heads, shape[0] // heads // 2, 2, shape[1])
        return paired.transpose(1, 2).reshape(shape)[rows.start : rows.stop].clone()

    def __getitem__(self, name: str) -> Tensor:
        """Return a complete parameter."""
        shape = self._tensors.shapes[self._names[name]]
        return self.read(name, "parameter", range(num_rows(shape))).view(shape)


def open_foreign(path: Path, model: nn.Module) -> Foreign | None:
    """Return the parameters of another library's checkpoint, or None if the path is not one."""
    if not path.is_dir():
        return None
    try:
        tensors = _open(path)
    except (DamagedError, OSError) as error:
        raise TrainError(f"{path} cannot be read: {error}") from None
    return Foreign(tensors, model, path) if tensors else None


def _open(path: Path) -> "_Tensors | None":
    if path.name == CHECKPOINTS and (saved := checkpoints_in(path)):
        path = saved[0]
    if (path / _INDEX).is_file():
        return _Distributed(path)
    if any(path.glob("*.distcp")):
        raise DamagedError(f"it has no {_INDEX}, which is written last: use an older checkpoint")
    if (path / NAME).is_file():
        try:
            values = unsealed(read_file(path / NAME, 1 << 30))
        except DamagedError:
            return None  # of trnslurm, and damaged
        if values.get("format") != OF_SCRIPTS:
            return None
        check_files(path, values["files"])
        hash_files(path, values["files"])
        return _Safetensors(Files(path, values["files"]))
    if shards := [file.name for file in path.glob("shard-*.safetensors")]:
        return _Safetensors(Files(path, shards))
    return None


class _Tensors(ABC):
    """The tensors of a checkpoint."""

    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def rows(self, name: str, rows: range) -> Tensor:
        """Return some of a tensor's rows."""


class _Safetensors(_Tensors):
    def __init__(self, files: Files) -> None:
        self._files = files
        self.shapes = {name: files.shape(name) for name in files.names()}

    def rows(self, name: str, rows: range) -> Tensor:
        shape = self.shapes[name]
        begin = (rows.start, *(0 for _ in shape[1:])) if shape else ()
        found = torch.empty((len(rows), *shape[1:]) if shape else (), dtype=self._files.dtype(name))
        if problem := self._files.fill(name, Part(found, begin, shape, mine=True)):
            raise TrainError(problem)
        return found.reshape(found.shape or (1,))


class _Distributed(_Tensors):
    def __init__(self, path: Path) -> None:
        self._path = path
        index = _read_index(path)
        try:
            self._tensors = {
                name: one
                for name, one in index.state_dict_metadata.items()
                if hasattr(one, "chunks") and hasattr(one, "properties")
            }
            self.shapes = {name: tuple(one.size) for name, one in self._tensors.items()}
            # Chunks are known by where they begin.
            self._places = {
                (key.fqn, tuple(key.offset or ())): place
                for key, place in index.storage_data.items()
                if key.fqn in self._tensors
            }
        except (AttributeError, TypeError):
            raise DamagedError(f"{_INDEX}: not a torch.distributed.checkpoint index") from None

    def rows(self, name: str, rows: range) -> Tensor:
        one, shape = self._tensors[name], self.shapes[name]
        found = torch.empty((len(rows), *shape[1:]), dtype=one.properties.dtype)
        copied = 0
        for chunk in one.chunks:
            begin, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            first, end = (begin[0], begin[0] + sizes[0]) if shape else (0, 1)
            low, high = max(first, rows.start), min(end, rows.stop)
            if low >= high:
                continue
            values = self._chunk(name, begin, sizes).reshape(sizes or (1,))
            here = [slice(low - rows.start, high - rows.start)]
            here += [slice(b, b + n) for b, n in zip(begin[1:], sizes[1:], strict=True)]
            piece = values[low - first : high - first]
            found[tuple(here)] = piece
            copied += piece.numel()
        if copied != found.numel():
            raise TrainError(f"{self._path}: {name} is not complete")
        return found

    def _chunk(self, name: str, begin: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        place = self._places.get((name, begin))
        if place is None:
            raise TrainError(f"{self._path}: {name} is not complete")
        file = PurePosixPath(str(place.relative_path))
        if file.name != str(file) or getattr(place, "transform_descriptors", None):
            raise TrainError(
                f"{self._path}: {file} is compressed or in another directory: save the checkpoint "
                "uncompressed in one directory"
            )
        try:
            with open_file(self._path / file.name) as stream:
                stream.seek(place.offset)
                content = stream.read(place.length)
            values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except OSError as error:
            raise TrainError(f"{self._path / file.name}: {error.strerror}") from None
        except Exception:  # a damaged file raises anything
            values = None
        if not isinstance(values, Tensor) or tuple(values.shape) != sizes:
            raise TrainError(f"{self._path / file.name} is damaged at {name}")
        return values


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise DamagedError(
                f"{_INDEX} contains a {module}.{name}, which PyTorch never writes there"
            )
        return PurePosixPath if module == "pathlib" else super().find_class(module, name)


def _read_index(path: Path) -> Any:
    try:
        return _Unpickler(io.BytesIO(read_file(path / _INDEX, _MOST_INDEX))).load()
    except (DamagedError, OSError):
        raise
    except Exception:  # a damaged pickle raises anything
        raise DamagedError(f"{_INDEX} is damaged") from None


def _match(saved: Collection[str], wanted: Iterable[str]) -> tuple[dict[str, str], bool]:
    """Return the saved name of each parameter, and whether the names are torchtitan's."""
    wanted = list(wanted)
    prefix = _prefix(saved, wanted)
    if prefix is not None:
        # The optimizer and the like are next to the model. Extra names inside it are reported.
        tops = {name.partition(".")[0] for name in wanted}
        inside = (name.removeprefix(prefix) for name in saved if name.startswith(prefix))
        return {name: prefix + name for name in inside if name.partition(".")[0] in tops}, False
    titan = {name: options for name in wanted if (options := _of_torchtitan(name))}
    prefix = _prefix(saved, ["tok_embeddings.weight"])
    if prefix is None or not titan:
        return {}, False
    found = {
        name: prefix + each
        for name, options in titan.items()
        for each in options
        if prefix + each in saved
    }
    return found, True


def _of_torchtitan(name: str) -> list[str]:
    for pattern, options in _OF_TORCHTITAN:
        if match := re.fullmatch(pattern, name):
            return [match.expand(each) for each in options]
    return []


def _prefix(saved: Collection[str], wanted: list[str]) -> str | None:
    """Return the prefix of most parameters' names in the checkpoint, the shortest if tied."""
    longest = max(wanted, key=len)
    before = {
        name.removesuffix(longest)
        for name in saved
        if name == longest or name.endswith(f".{longest}")
    }
    counts = {each: sum(each + name in saved for name in wanted) for each in before}
    return min(before, key=lambda each: (-counts[each], len(each)), default=None)
