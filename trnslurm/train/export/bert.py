"""What the exports of BERT share: its tokenizer, and what labelled data says of a classifier."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from trnslurm.train.checkpoint import Manifest
from trnslurm.train.data.labelled import Labelled, open_labelled
from trnslurm.train.errors import TrainError
from trnslurm.train.export.folder import Tokens, warn
from trnslurm.train.plan import Plan

SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}


def make_tokenizer(path: Path, model: dict[str, Any]) -> Any:
    """Make BERT's tokenizer of a tokenizer.json, with the frame of [CLS] and [SEP] in any case."""
    if json.loads(path.read_text())["model"]["type"] != "WordPiece":
        raise ValueError("not of BERT's")
    tokenizer: Any = Tokenizer.from_file(str(path))  # its steps are annotated as not to be set
    if tokenizer.get_vocab_size() > model["vocab_size"]:
        raise ValueError(f"it has {tokenizer.get_vocab_size()} tokens, more than the model")
    if tokenizer.post_processor is None:
        frame = [(token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
        tokenizer.post_processor = BertProcessing(*frame)
    fast: Any = PreTrainedTokenizerFast  # it has no annotations
    return fast(
        tokenizer_object=tokenizer, model_max_length=model["max_position_embeddings"], **SPECIAL
    )


def make_classifier(plan: Plan, end_of_text: int | None) -> Any:
    """Make the model of a plan, whose parameters are yet to come; its labels have their names."""
    make_config: Any = BertConfig
    make_model: Any = BertForSequenceClassification  # neither has annotations
    config = make_config(**plan.model)
    try:
        names = _open(plan).labels
    except TrainError as error:
        warn(f"exported without the names of labels: {error}")
        names = ()
    if len(names) == config.num_labels:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    config.problem_type = "single_label_classification" if config.num_labels > 1 else "regression"
    return make_model(config)


def labelled_tokens(plan: Plan, manifest: Manifest, run_dir: Path) -> Tokens:
    """Find the tokenizer beside labelled data, if it is the same still."""
    try:
        data = _open(plan)
        if data.fingerprint != manifest.facts["data"]:
            raise TrainError(f"{plan.data} is not what this run was trained on any more")
        path = Path(plan.data).expanduser() / data.index.tokenizer.file
        return Tokens(tokenizer=make_tokenizer(path, plan.model))
    except Exception as error:  # the library tokenizers raises nothing more particular
        warn(f"exported without a tokenizer: {error}; --tokenizer DIR adds one")
        return Tokens()


def _open(plan: Plan) -> Labelled:
    return open_labelled(
        Path(plan.data).expanduser(),
        "train",
        seq_len=plan.seq_len,
        vocab_size=plan.model["vocab_size"],
        seed=plan.seed,
    )
