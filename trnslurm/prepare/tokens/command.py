"""The command line: python -m trnslurm.prepare …, for token files."""

import argparse
from collections.abc import Sequence

from trnslurm.prepare import options
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.options import HOLDOUT, as_output, as_path
from trnslurm.prepare.prepared import report
from trnslurm.prepare.text.sources import dataset_files
from trnslurm.prepare.tokens.run import Request, prepare


def run(arguments: Sequence[str]) -> None:
    """Prepare token files, and print what there is now."""
    given = _parser().parse_args(arguments)
    result = prepare(_request(given))
    splits = [
        f"{name} {entry['tokens']:,} tokens in {entry['documents']:,} documents"
        for name, entry in result.index["splits"].items()
    ]
    summary = f"{', '.join(splits)}, vocabulary {result.index['vocab_size']:,}"
    report(result, summary, as_json=given.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare",
        description="Tokenize text into the files that training reads.",
        epilog="Others: bert (shards for BERT's pretraining), labelled (rows with labels), fetch "
        "(a dataset from the Hub), model (a model from it), download (what was published), verify "
        "DIR (read prepared data whole).",
    )
    add = parser.add_argument
    add("--output", type=as_output, required=True, metavar="DIR", help="the prepared data")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", "--input", type=as_path, nargs="+", metavar="FILE", help="text or JSON lines"
    )
    source.add_argument("--dataset", type=as_path, metavar="DIR", help="by split, as from fetch")
    add("--tokenizer", metavar="FILE|DIR|train:V", help="default: the dataset's own, if it has one")
    add("--end-of-text", default="", metavar="TOKEN", help="default: the tokenizer's usual one")
    options.add_document(parser)
    share = f"share of documents for eval ({HOLDOUT})"
    add("--holdout", type=float, metavar="SHARE", help=share)
    options.add_work(parser)
    return parser


def _request(given: argparse.Namespace) -> Request:
    options.check_work(given)
    files = dataset_files(given.dataset) if given.dataset else options.own_text(given.text)
    splits = {file.split for file in files}
    if "eval" in splits and given.holdout:
        raise PrepareError(
            f"--holdout {given.holdout}: the dataset has a split for evaluation: leave it out"
        )
    holdout = 0.0 if "eval" in splits else HOLDOUT if given.holdout is None else given.holdout
    if not 0 <= holdout < 1:
        raise PrepareError(f"--holdout {holdout}: must be 0 or more, and less than 1")
    return Request(
        output=given.output,
        files=files,
        rule=options.rule(given, files),
        tokenizer=options.source_tokenizer(given),
        end_of_text=given.end_of_text,
        holdout=holdout,
        processes=given.processes,
        chunk_bytes=given.chunk_bytes,
        force=given.force,
    )
