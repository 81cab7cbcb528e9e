"""Exports a checkpoint to a Hugging Face folder. These are the parts that all jobs share."""

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.logging import disable_progress_bar

from trnslurm.contract.checkpoints import checkpoint_name, checkpoints_in, export_name, step_of
from trnslurm.contract.rundir import RunFiles
from trnslurm.datasets.place import URL
from trnslurm.saves import directory
from trnslurm.saves.memory import write_each
from trnslurm.train.checkpoint.manifest import CheckpointManifest, shorten
from trnslurm.train.checkpoint.pretrained import load_parameters
from trnslurm.train.checkpoint.reading import find_best, newest_whole, parameter_reader, prove
from trnslurm.train.data.text import END_OF_TEXT, is_ours, read_token_index
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import JobPlan, load_plan

BEST = "best"
"""Used instead of a step: the checkpoint with the best score."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

WriteWeights = Callable[[Path], None]
"""Writes a model's weights and configuration into a folder."""

MakeModel = Callable[[JobPlan, int | None], Any]
"""Builds a plan's transformers model, given the end-of-text token, if it is known."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
"""The files of a tokenizer in a Hugging Face folder."""


Tokens = tuple[Any, int | None]
"""The transformers tokenizer of a model's data and the end-of-text token; None if unknown."""

FindTokens = Callable[[JobPlan, CheckpointManifest, Path], Tokens]
"""Finds the tokens of the data that a checkpoint in a run directory was trained on."""


def export_job(make_model: MakeModel, find_tokens: FindTokens) -> None:
    """Export as the command line says, without a device or other workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    options = _parse()
    plan = load_plan(options.plan)
    files = RunFiles(options.plan.resolve().parent)
    manifest = None if options.source else _choose(files.checkpoints, options.step)
    name = export_name(manifest.step) if manifest else Path(options.source).stem
    name += f"-{options.weights}" if options.weights else ""
    output = (options.output or files.export(name)).resolve()
    _check_place(output, force=options.force)

    tokenizer, end_of_text = None, None
    if manifest and not options.tokenizer:
        try:
            tokenizer, end_of_text = find_tokens(plan, manifest, files.path)
        except Exception as error:  # the library tokenizers raises only Exception
            warn(f"exported without a tokenizer: {error}; --tokenizer DIR adds one")
    if manifest:
        with torch.device("meta"):  # neither memory nor time for parameters that are replaced
            model = make_model(plan, end_of_text)
        model.to(DTYPES[options.dtype])
        checkpoint = files.checkpoints / checkpoint_name(manifest.step)
        kind = options.weights or "parameter"
        write_weights = _parameter_files(model, checkpoint, manifest, kind)
    else:
        model = make_model(plan, None)
        load_parameters(model, options.source, asked_by="export")
        model.to(DTYPES[options.dtype])
        write_weights = model.save_pretrained
    _write(model, write_weights, options.tokenizer or tokenizer, output)
    _report(options, model, manifest, output, tokenizer=bool(options.tokenizer or tokenizer))


def _report(
    options: argparse.Namespace,
    model: Any,
    manifest: CheckpointManifest | None,
    output: Path,
    *,
    tokenizer: bool,
) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if options.json:
        origin = {"step": manifest.step} if manifest else {"from": options.source}
        values = {"directory": str(output), **origin, "parameters": parameters}
        print(json.dumps(values | {"dtype": options.dtype, "tokenizer": tokenizer}))
    else:
        origin_name = f"step {manifest.step}" if manifest else f"from {Path(options.source).name}"
        print(f"Wrote {output} ({origin_name}, {parameters / 1e6:,.1f} M parameters)")


def _stop(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a checkpoint as a Hugging Face folder.")
    add = parser.add_argument
    add("plan", type=Path, help="plan.json of the run")
    which = parser.add_mutually_exclusive_group()
    step = "this checkpoint, or the best by its score; default: the newest complete one"
    which.add_argument("--step", type=_step, metavar="N|best", help=step)
    source = "from elsewhere: a .pt file of AWS's BERT sample, a folder, another run's checkpoint"
    which.add_argument("--from", dest="source", metavar="FILE", help=source)
    add("--output", type=Path, metavar="DIR", help="default: exported/step-N in the run directory")
    add("--tokenizer", type=Path, metavar="DIR", help="add the tokenizer from this folder")
    add("--format", choices=["hf"], default="hf", help="hf: a folder for from_pretrained")
    add("--weights", metavar="KIND", help="what run.keep saves as KIND, not the parameters")
    add("--dtype", choices=DTYPES, default="float32", help="type of the weights")
    add("--force", action="store_true", help="replace an existing export")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def _step(text: str) -> int | str:
    return text if text == BEST else int(text)


def _best_of_followers(root: Path) -> Path | None:
    """Return the best checkpoint by the run's only job for each checkpoint, or None."""
    found = [best for best in root.parent.glob("follow/*/best/step-*") if best.is_dir()]
    return found[0] if len(found) == 1 else None


def _choose(root: Path, step: int | str | None) -> CheckpointManifest:
    """Find a step's checkpoint, the best one, or the newest complete one, and verify it."""
    there = checkpoints_in(root)
    if not there:
        raise TrainError(
            f"{root.parent} has no checkpoint: train.save_every sets when one is saved"
        )
    if step == BEST:
        best = find_best(root) or _best_of_followers(root)
        if best is None:
            raise TrainError(
                f"{root}: no checkpoint has a score. Set train.keep_best, or submit a job with "
                "--each-checkpoint-of and --highest or --lowest"
            )
        return prove(best)
    if step is not None:
        steps = [step_of(path.name) for path in reversed(there)]
        if step not in steps:
            raise TrainError(
                f"{root}: no checkpoint of step {step}; there are {', '.join(map(str, steps))}"
            )
        return prove(root / checkpoint_name(step))
    manifest, damaged = newest_whole(root)
    for path, reason in damaged:
        if path.exists():  # otherwise a run has deleted it in the meantime
            warn(f"{path} is damaged ({reason})")
    if manifest is None:
        raise TrainError(f"{root}: no checkpoint is complete")
    return manifest


def _check_place(output: Path, *, force: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / "config.json").is_file():
        raise TrainError(f"{output} already exists and is not an export: choose another --output")
    if not force:
        raise TrainError(f"{output} already exists: pass --force to replace it")


def text_tokens(plan: JobPlan, manifest: CheckpointManifest, run_dir: Path) -> Tokens:
    """Find the tokens of a text: bytes, or prepared data that has not changed."""
    path = Path(plan.data).expanduser()
    if not plan.data or path.is_file():
        return None, END_OF_TEXT
    if not is_ours(path) and (path.exists() or URL in plan.data):
        raise TrainError(f"{path} has no tokenizer from trnslurm data prepare")
    index = read_token_index(path)
    split = index.splits.get("train")
    require_unchanged(path, split.sha256 if split else None, manifest)
    fast: Any = PreTrainedTokenizerFast  # it has no annotations
    file = path / index.tokenizer.file
    tokenizer = fast(tokenizer_file=str(file), model_max_length=plan.seq_len)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(index.end_of_text)
    tokenizer.bos_token = tokenizer.eos_token
    return tokenizer, index.end_of_text


def require_unchanged(data: Path, fingerprint: str | None, manifest: CheckpointManifest) -> None:
    """Refuse data that has changed since a checkpoint was trained on it."""
    if fingerprint is None or manifest.facts.get("data", fingerprint) != fingerprint:
        raise TrainError(f"{data} has changed since this run was trained on it")


def _parameter_files(
    model: Any, checkpoint: Path, manifest: CheckpointManifest, kind: str
) -> WriteWeights:
    """Return a function that writes files as save_pretrained does, one parameter at a time.

    If two parameters are tied, the checkpoint has only one of them, and save_pretrained also writes
    only that one.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: each for name, each in model.state_dict().items() if name not in every}
    wanted = dict(model.named_parameters()) | buffers
    shapes = {name: list(tensor.shape) for name, tensor in wanted.items()}
    if shapes != manifest.shapes:
        missing = [name for name in shapes if name not in manifest.shapes]
        if {**shapes, **manifest.shapes} == shapes:
            raise TrainError(
                f"{checkpoint} has no {', '.join(shorten(missing))}: train.py must pass "
                "make_optimizer all parameters (including frozen ones) and persistent buffers"
            )
        raise TrainError(f"{checkpoint} does not match the model in plan.json")
    read = parameter_reader(checkpoint, manifest, kind)

    def write(folder: Path) -> None:
        # Its configuration only: without tensors save_pretrained writes no weights.
        model.save_pretrained(folder, state_dict={})
        split = split_torch_state_dict_into_shards(wanted)
        for name, names in split.filename_to_tensors.items():
            write_each(
                folder / name,
                {each: (wanted[each].dtype, wanted[each].shape) for each in names},
                lambda each: read(each).to(wanted[each].dtype),
                {"format": "pt"},
            )
        if split.is_sharded:
            total = {"total_parameters": model.num_parameters(), **split.metadata}
            index = {"metadata": total, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")

    return write


def _write(model: Any, write_weights: WriteWeights, tokenizer: Any, output: Path) -> None:
    """Write the folder atomically; the tokenizer can be a folder that contains one."""
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    # If DeepSpeed is installed, transformers (4.57.6) imports it to save, and DeepSpeed would look
    # for a GPU and print to stdout that there is none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers 5 has one, on stderr
    _remove_abandoned(output)
    lock = None
    try:
        partial.mkdir(parents=True)
        lock = _lock(partial)
        write_weights(partial)
        if isinstance(tokenizer, Path):
            _copy_tokenizer(tokenizer, partial, model.config.vocab_size)
        elif tokenizer:
            tokenizer.save_pretrained(partial)
        for path in partial.iterdir():
            with path.open("rb") as file:
                directory.fsync_file(file)
        directory.fsync_directory(partial)
        _put_in_place(partial, output)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TrainError(f"{output}: cannot be written ({reason})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_abandoned(output: Path) -> None:
    """Remove what killed exports left behind; each may be as large as the model."""
    ours = rf"\.{re.escape(output.name)}\.(partial|replaced)-[0-9]+"
    with suppress(FileNotFoundError):
        for path in [each for each in output.parent.iterdir() if re.fullmatch(ours, each.name)]:
            if (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder; return None if another process has locked it or locks do not work here."""
    with suppress(OSError):  # NFS locks no directory (man 2 flock)
        found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(found)
            raise
        return found
    return None


def _copy_tokenizer(source: Path, folder: Path, vocab_size: int) -> None:
    """Copy a tokenizer's files next to the model; check that it loads and fits the model."""
    files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not files:
        raise TrainError(f"--tokenizer: {source} has none of {', '.join(TOKENIZER_FILES)}")
    for file in files:
        shutil.copyfile(file, folder / file.name)
    auto: Any = AutoTokenizer  # it has no annotations
    try:
        tokenizer = auto.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged file makes transformers raise whatever comes
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise TrainError(f"--tokenizer: {source} has no loadable tokenizer ({reason})") from None
    if len(tokenizer) > vocab_size:
        raise TrainError(
            f"--tokenizer: {source} has {len(tokenizer)} tokens, but the model has {vocab_size}"
        )


def _put_in_place(partial: Path, output: Path) -> None:
    replaced = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    if output.exists():
        output.rename(replaced)
    directory.rename_durably(partial, output)
    shutil.rmtree(replaced, ignore_errors=True)


def warn(line: str) -> None:
    """Print a warning."""
    print(f"warning: {line}", file=sys.stderr)
