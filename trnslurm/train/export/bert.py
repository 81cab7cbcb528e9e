"""Exports of BERT and its relatives: tokenizers, and the names of a classifier's labels."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing
from transformers import PreTrainedTokenizerFast

from trnslurm.train.checkpoint.manifest import CheckpointManifest
from trnslurm.train.data.labelled import Labelled, open_labelled
from trnslurm.train.encoders import make_config, new_classifier, positions
from trnslurm.train.errors import TrainError
from trnslurm.train.export.folder import Tokens, require_unchanged, warn
from trnslurm.train.plan import JobPlan

# The special tokens of RoBERTa and ALBERT that differ from BERT's.
_OTHERS = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}


def make_tokenizer(path: Path, model: dict[str, Any]) -> Any:
    """Make a model's tokenizer from a tokenizer.json, with training's special tokens."""
    tokenizer: Any = Tokenizer.from_file(str(path))  # its steps are annotated as not to be set
    if tokenizer.get_vocab_size() > model["vocab_size"]:
        raise ValueError(f"it has {tokenizer.get_vocab_size()} tokens, more than the model has")
    special = {}
    for name, other in _OTHERS.items():
        known = (
            token
            for token in (f"[{name.upper()}]", other)
            if tokenizer.token_to_id(token) is not None
        )
        special[f"{name}_token"] = next(known, None)
    if not special["cls_token"] or not special["sep_token"]:
        raise ValueError("not from BERT or a relative")
    if tokenizer.post_processor is None:
        frame = [special["sep_token"], special["cls_token"]]
        tokenizer.post_processor = BertProcessing(*((t, tokenizer.token_to_id(t)) for t in frame))
    names = ["input_ids", "attention_mask"]
    if model.get("type_vocab_size", 2) > 1:  # others of the family refuse them
        names.insert(1, "token_type_ids")
    fast: Any = PreTrainedTokenizerFast  # it has no annotations
    return fast(
        tokenizer_object=tokenizer,
        model_max_length=positions(model),
        model_input_names=names,
        # Else transformers (4.57.6) sets it to False, whatever the file says.
        add_prefix_space=getattr(tokenizer.pre_tokenizer, "add_prefix_space", False),
        **special,
    )


def make_classifier(plan: JobPlan, end_of_text: int | None, *, of_words: bool = False) -> Any:
    """Build a plan's model without parameters, with the names of its labels."""
    config = make_config(plan.model)
    try:
        names = _open(plan).labels
    except TrainError as error:
        warn(f"exported without the labels' names: {error}")
        names = ()
    if len(names) == config.num_labels:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    if not of_words:
        config.problem_type = (
            "single_label_classification" if config.num_labels > 1 else "regression"
        )
    return new_classifier(config, of_words)


def labelled_tokens(plan: JobPlan, manifest: CheckpointManifest, run_dir: Path) -> Tokens:
    """Find the tokenizer next to the labelled data, if the data has not changed."""
    data, directory = _open(plan), Path(plan.data).expanduser()
    require_unchanged(directory, data.fingerprint, manifest)
    return make_tokenizer(directory / data.index.tokenizer.file, plan.model), None


def _open(plan: JobPlan) -> Labelled:
    return open_labelled(
        Path(plan.data).expanduser(),
        "train",
        seq_len=plan.seq_len,
        vocab_size=plan.model["vocab_size"],
        seed=plan.seed,
    )
