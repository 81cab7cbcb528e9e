"""The command lines: python -m trnslurm.prepare fetch, model, download, s3 and verify."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from trnslurm.prepare import options
from trnslurm.prepare.arguments import add_option, as_path
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.fetch import published
from trnslurm.prepare.fetch.hub import HubDataset, fetch_dataset, fetch_model
from trnslurm.prepare.prepared import INDEX, find_damage, read_index


def dataset(arguments: Sequence[str]) -> None:
    """Fetch a dataset from the Hub, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare fetch",
        description="Fetch a dataset and a tokenizer from the Hugging Face Hub.",
    )
    add = parser.add_argument
    add_option(parser, options.OUTPUT)
    add("--dataset", required=True, metavar="NAME", help="for example wikitext")
    add("--config", metavar="NAME", help="for example wikitext-103-raw-v1")
    add_option(parser, options.REVISION)
    add("--tokenizer", metavar="NAME", help="a model on the Hub, for example gpt2")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--column", default="text", metavar="NAME", help="the column with the text")
    every = "all columns, as for labelled rows"
    which.add_argument("--all-columns", dest="column", action="store_const", const=None, help=every)
    given, as_json = _parsed(parser, arguments)
    fetch_dataset(HubDataset(**given)).tell(as_json=as_json)


def model(arguments: Sequence[str]) -> None:
    """Fetch a model from the Hub, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare model",
        description="Fetch a model's weights and tokenizer from the Hugging Face Hub.",
    )
    add = parser.add_argument
    add_option(parser, options.OUTPUT)
    add("--model", required=True, metavar="NAME", help="for example google-bert/bert-base-cased")
    add_option(parser, options.REVISION)
    given, as_json = _parsed(parser, arguments)
    fetch_model(**given).tell(as_json=as_json)


def published_file(arguments: Sequence[str]) -> None:
    """Fetch a published file, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare download",
        description="Fetch a published file, and unpack it if it is a tar file of BERT shards.",
    )
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="http:// or https://")
    add_option(parser, options.OUTPUT)
    add(
        "--shards",
        action="store_true",
        help="the file is a tar file of shards: unpack and check them",
    )
    add("--seq-len", type=int, metavar="N", help="required number of tokens per sample")
    add(
        "--max-pred",
        type=int,
        metavar="N",
        help="required maximum number of masked tokens per sample",
    )
    given, as_json = _parsed(parser, arguments)
    published.fetch(**given).tell(as_json=as_json)


def objects(arguments: Sequence[str]) -> None:
    """Fetch files from S3, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare s3",
        description="Fetch an object in S3, or all objects under a prefix.",
    )
    parser.add_argument("place", metavar="s3://BUCKET/PREFIX")
    add_option(parser, options.OUTPUT)
    given, as_json = _parsed(parser, arguments)
    fetch = importlib.import_module("trnslurm.prepare.fetch.s3").fetch
    fetch(**given).tell(as_json=as_json)


def verify(arguments: Sequence[str]) -> None:
    """Read prepared data or published shards completely, and print a summary."""
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare verify", description="Read prepared data completely."
    )
    parser.add_argument("directory", type=as_path)
    directory = parser.parse_args(arguments).directory
    index = read_index(directory)
    if index is None:
        if (directory / INDEX).exists() or not any(directory.glob(f"*{published.SHARD}")):
            raise PrepareError(f"{directory}: contains no prepared data")
        print(f"{directory}: {published.verify(directory)}, all read completely")
        return
    if damaged := find_damage(directory, index):
        raise PrepareError(f"{directory}: {damaged} is damaged: prepare it again with --force")
    print(f"{directory}: complete, matches its index")


def _parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[dict[str, Any], bool]:
    """Return the options of a fetch, and whether to print JSON."""
    add_option(parser, options.FORCE)
    add_option(parser, options.JSON)
    given = vars(parser.parse_args(arguments))
    return given, given.pop("json")
