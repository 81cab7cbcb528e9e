"""Write a checkpoint as a Hugging Face folder, which from_pretrained loads. In a run directory:

    PYTHONPATH=code python code/jobs/bert_mrpc/export.py plan.json

`trnslurm export RUN` does this with the Python of the run's cluster.
"""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from trnslurm.train.checkpoint import Manifest
from trnslurm.train.errors import TrainError, run_job
from trnslurm.train.export import Tokens, export_job, warn
from trnslurm.train.labelled import open_labelled, read_labelled_index
from trnslurm.train.plan import Plan

SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}


def make_model(plan: Plan, end_of_text: int | None) -> BertForSequenceClassification:
    """Make the model of a plan, whose parameters are yet to come; its samples need no token's."""
    config = BertConfig(**plan.model)
    try:
        names = read_labelled_index(Path(plan.data).expanduser()).labels
    except TrainError as error:
        warn(f"exported without the labels' names: {error}")
        names = []
    if len(names) == config.num_labels:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    config.problem_type = "regression" if config.num_labels == 1 else "single_label_classification"
    return BertForSequenceClassification(config)


def find_tokens(plan: Plan, manifest: Manifest, run_dir: Path) -> Tokens:
    """Find the tokenizer beside prepared data, if it is the same still."""
    directory = Path(plan.data).expanduser()
    try:
        text = open_labelled(
            directory,
            "train",
            seq_len=plan.seq_len,
            vocab_size=plan.model["vocab_size"],
            seed=plan.seed,
        )
        if text.fingerprint != manifest.facts["data"]:
            raise TrainError(f"{directory} is not what this run was trained on any more")
        path = directory / text.index.tokenizer.file
        return Tokens(tokenizer=make_tokenizer(path, plan.model["max_position_embeddings"]))
    except Exception as error:  # the library tokenizers raises nothing more particular
        warn(f"exported without a tokenizer: {error}; --tokenizer DIR adds one")
        return Tokens()


def make_tokenizer(path: Path, positions: int) -> PreTrainedTokenizerFast:
    """Make BERT's tokenizer of a tokenizer.json, with the frame of [CLS] and [SEP] in any case."""
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.post_processor is None:
        frame = [(token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
        tokenizer.post_processor = BertProcessing(*frame)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=positions, **SPECIAL
    )


if __name__ == "__main__":
    run_job(lambda: export_job(make_model, find_tokens))
