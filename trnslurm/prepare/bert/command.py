"""The command line: python -m trnslurm.prepare bert …."""

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from trnslurm.prepare import options
from trnslurm.prepare.bert import wikiextractor
from trnslurm.prepare.bert.corpus import Form
from trnslurm.prepare.bert.settings import Settings
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.options import HOLDOUT, as_output, as_path
from trnslurm.prepare.prepared import Result, report
from trnslurm.prepare.text.sources import TEXT_OPTION, dataset_files


def run(arguments: Sequence[str]) -> None:
    """Prepare, and print what there is now."""
    given = _parser().parse_args(arguments)
    result = _prepare(given)
    splits = [
        f"{name} {entry['samples']:,} samples of {entry['documents']:,} documents in "
        f"{len(entry['shards']):,} shards"
        for name, entry in result.index["splits"].items()
    ]
    summary = f"{', '.join(splits)}, vocabulary {result.index['vocab_size']:,}"
    report(result, summary, as_json=given.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare bert",
        description="Make shards of samples for BERT's pretraining: masked tokens, and pairs.",
    )
    add = parser.add_argument
    add("--output", type=as_output, required=True, metavar="DIR", help="the prepared data")
    source = parser.add_mutually_exclusive_group(required=True)
    text = "text or JSON lines, a directory of them, or WikiExtractor's output"
    source.add_argument("--text", "--input", type=as_path, nargs="+", metavar="FILE|DIR", help=text)
    split = "what fetch has fetched: its training split"
    source.add_argument("--dataset", type=as_path, metavar="DIR", help=split)
    source.add_argument(
        "--wikiextractor", type=as_path, nargs="+", metavar="DIR", help="its output"
    )
    tokenizer = "one of BERT's, or trained on the text"
    add("--tokenizer", required=True, metavar="FILE|DIR|train:V", help=tokenizer)
    options.add_document(parser)
    wrapped = "lines are wrapped: their ends do not end sentences"
    add("--wrapped", action="store_true", help=wrapped)
    add("--seq-len", type=int, default=128, metavar="N", help="tokens of a sample (128)")
    add("--max-pred", type=int, default=20, metavar="N", help="most masked tokens (20)")
    share = "fraction of tokens to mask (0.15)"
    add("--masked-lm-prob", type=float, default=0.15, metavar="SHARE", help=share)
    add("--whole-words", action="store_true", help="mask all tokens of a word or none")
    dupes = "passes over the text, each with other masks (5)"
    add("--dupe-factor", type=int, default=5, metavar="N", help=dupes)
    add("--seed", type=int, default=12345, metavar="N", help="(12345)")
    add("--shards", type=int, metavar="N", help="default: by the size of the text")
    add("--test-shards", type=int, default=0, metavar="N", help="(0)")
    held_out = f"share of documents for test shards ({HOLDOUT})"
    add("--holdout", type=float, default=HOLDOUT, metavar="SHARE", help=held_out)
    options.add_work(parser)
    return parser


def import_late(name: str) -> Any:
    """Import a module of this package that needs h5py, which other preparations do without."""
    try:
        return importlib.import_module(f"trnslurm.prepare.bert.{name}")
    except ModuleNotFoundError as error:
        if error.name != "h5py":
            raise
        raise PrepareError("shards are HDF5 files, which need h5py: pip install h5py") from None


def _prepare(given: argparse.Namespace) -> Result:
    run = import_late("run")
    options.check_work(given)
    _sort_out(given)
    if (given.shards is not None and given.shards < 1) or given.test_shards < 0:
        raise PrepareError("--shards must be 1 or more, --test-shards 0 or more")
    if not 0 < given.holdout < 1:
        raise PrepareError(f"--holdout {given.holdout}: must be more than 0, and less than 1")
    settings = Settings(**{field.name: getattr(given, field.name) for field in fields(Settings)})
    settings.check()
    request = run.Request(
        output=given.output,
        settings=settings,
        form=Form(articles=given.wikiextractor is not None, wrapped=given.wrapped),
        **_source(given),
        tokenizer=options.tokenizer(given.tokenizer),
        shards=given.shards,
        test_shards=given.test_shards,
        holdout=given.holdout,
        processes=given.processes,
        chunk_bytes=given.chunk_bytes,
        force=given.force,
    )
    result: Result = run.prepare(request)
    return result


def _sort_out(given: argparse.Namespace) -> None:
    """Move what --text names to --wikiextractor, if it is WikiExtractor's output."""
    theirs = [path for path in given.text or () if wikiextractor.is_output(path)]
    if not theirs:
        return
    if others := [str(path) for path in given.text if path not in theirs]:
        raise PrepareError(
            f"{TEXT_OPTION} {others[0]}: is other text than WikiExtractor's in {theirs[0]}: "
            "prepare them apart"
        )
    given.text, given.wikiextractor = None, theirs


def _source(given: argparse.Namespace) -> dict[str, Any]:
    if given.text:
        files = options.own_text(given.text)
        return {"files": files, "rule": options.rule(given, files)}
    if given.dataset:
        # Test shards are held out of the same, whatever other splits there are.
        files = [file for file in dataset_files(given.dataset) if file.split == "train"]
        return {"files": files, "rule": options.rule(given, files)}
    for name in ("document_per", "document_start", "column", "wrapped"):
        if getattr(given, name):
            option = f"--{name.replace('_', '-')}"
            raise PrepareError(f"{option}: WikiExtractor's files say it themselves: leave it out")
    return {"files": wikiextractor.article_files(given.wikiextractor), "rule": wikiextractor.RULE}
