"""The command line: python -m trnslurm.prepare …; bert, labelled, fetch, download, verify."""

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from trnslurm.prepare import fetching, options, published
from trnslurm.prepare.bert import command as bert
from trnslurm.prepare.errors import KeptError, PrepareError
from trnslurm.prepare.labelled import command as labelled
from trnslurm.prepare.options import HOLDOUT, as_output, as_path
from trnslurm.prepare.prepared import INDEX, find_damage, read_index, report
from trnslurm.prepare.run import Request, prepare
from trnslurm.prepare.sources import dataset_files
from trnslurm.prepare.weights import Model, fetch_model

_KEPT = "what is finished is kept, run again to go on"


class _Stopped(BaseException):
    """A signal asked to stop."""


def main() -> None:
    """Run, and turn what a user can mend into one line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    commands = {
        "bert": bert.run,
        "labelled": labelled.run,
        "fetch": _fetch,
        "download": published.run,
        "model": _fetch_model,
        "verify": _verify,
    }
    arguments = sys.argv[1:]
    try:
        if arguments and arguments[0] in commands:
            commands[arguments[0]](arguments[1:])
        else:
            _prepare(arguments)
    except PrepareError as error:
        sys.exit(f"error: {error}")
    except KeptError as error:
        sys.exit(f"error: {error}: {_KEPT}")
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except _Stopped as stopped:
        print(f"\nstopped: {_KEPT}", file=sys.stderr)
        sys.exit(128 + stopped.args[0])


def _stop(number: int, frame: object) -> NoReturn:
    raise _Stopped(number)


def _prepare(arguments: Sequence[str]) -> None:
    given = _prepare_parser().parse_args(arguments)
    result = prepare(_request(given))
    report(result, _summary(result.index), as_json=given.json)


def _prepare_parser() -> argparse.ArgumentParser:
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
    share = f"of documents, for eval ({HOLDOUT})"
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


def _summary(index: dict[str, Any]) -> str:
    splits = [
        f"{name} {entry['tokens']:,} tokens in {entry['documents']:,} documents"
        for name, entry in index["splits"].items()
    ]
    return f"{', '.join(splits)}, vocabulary {index['vocab_size']:,}"


def _verify(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare verify", description="Read prepared data whole."
    )
    parser.add_argument("directory", type=as_path)
    directory = parser.parse_args(arguments).directory
    index = read_index(directory)
    if index is None:
        if (directory / INDEX).exists() or not any(directory.glob(f"*{published.SHARD}")):
            raise PrepareError(f"{directory}: no prepared data")
        print(f"{directory}: {published.verify(directory)}, each read whole")
        return
    if damaged := find_damage(directory, index):
        raise PrepareError(f"{directory}: {damaged} is damaged: make it again with --force")
    print(f"{directory}: as its index says")


def _fetch(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare fetch",
        description="Fetch a dataset and a tokenizer from the Hugging Face Hub.",
    )
    add = parser.add_argument
    add(
        "--output",
        type=as_output,
        required=True,
        metavar="DIR",
        help="what --dataset shall read",
    )
    add("--dataset", required=True, metavar="NAME", help="for example wikitext")
    add("--config", metavar="NAME", help="for example wikitext-103-raw-v1")
    add("--revision", metavar="NAME", help="a branch, tag or commit of the dataset")
    add("--tokenizer", metavar="NAME", help="a model on the Hub, for example gpt2")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--column", default="text", metavar="NAME", help="the column of the text")
    every = "all columns, as of labelled rows"
    which.add_argument("--all-columns", dest="column", action="store_const", const=None, help=every)
    add("--force", action="store_true", help="replace what is there")
    given = parser.parse_args(arguments)
    print(fetching.fetch(fetching.Wanted(**vars(given))))


def _fetch_model(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare model",
        description="Fetch a model's weights and tokenizer from the Hugging Face Hub.",
    )
    add = parser.add_argument
    add("--output", type=as_output, required=True, metavar="DIR", help="the folder")
    add("--model", required=True, metavar="NAME", help="for example google-bert/bert-base-cased")
    add("--revision", metavar="NAME", help="a branch, tag or commit of the model")
    add("--force", action="store_true", help="replace what is there")
    given = parser.parse_args(arguments)
    wanted = Model(model=given.model, revision=given.revision)
    print(fetch_model(wanted, given.output, force=given.force))


if __name__ == "__main__":
    main()
