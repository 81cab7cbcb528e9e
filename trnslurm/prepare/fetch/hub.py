"""The Hugging Face Hub, through its own libraries."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from trnslurm.prepare.errors import PrepareError


def library(name: str) -> Any:
    """Import one of the Hub's libraries."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise PrepareError(
            f"fetch needs the Python package {name}: {sys.executable} -m pip install "
            "'trnslurm[data]', here or on any machine with a network, and copy what it fetched"
        ) from None


def ask_hub(what: str, ask: Callable[[], Any]) -> Any:
    """Ask the Hub; the libraries find a token themselves, in HF_TOKEN or its file."""
    try:
        return ask()
    except Exception as error:  # these libraries raise errors of any kind
        words = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if token := os.environ.get("HF_TOKEN"):
            words = words.replace(token, "***")
        raise PrepareError(
            f"{what}: not fetched from the Hub ({words}): check the name, the network and HF_TOKEN"
        ) from None
