"""Finds the Hugging Face Hub item that a job lacks, and the command that downloads it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from trnslurm.contract.files import read_file
from trnslurm.contract.rundir import NODE_SCRIPT
from trnslurm.node.triage.causes import Cause

_NAME = r"(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?)"
_FULL = r"(?P<name>\w[\w.-]*/\w[\w.-]*)"
_MODEL = (
    rf"\b(?:from_pretrained|snapshot_download|hf_hub_download)\(\s*(?:\w+=)?[\"']{_NAME}[\"']",
    rf"/api/models/{_FULL}",
    rf"(?:huggingface\.co\S*?|with url: )/{_FULL}/resolve/",
)
_DATASET = (
    rf"\bload_dataset\(\s*(?:path=)?[\"']{_NAME}[\"']",
    rf"Couldn't reach '{_NAME}' on the Hub",
    rf"/(?:api/)?datasets/{_FULL}",
)
# The script's own option, as node.sh passes it. A path would start with a slash or a dot.
_OPTION = rf"(?<![\w-])--(?=[\w-]*model)[\w-]+(?:=| )'?{_FULL}(?=['\s]|$)"
_SHARED = "HF_HOME must be a directory that the nodes share"


def missing_here(run: Path, known: Cause | None, lines: Iterable[str]) -> tuple[str, str] | None:
    """Return cause and fix if a node could not download from the Hub and the logs name the item."""
    if not known or known.name != "hub-unreachable":
        return None
    text = "\n".join(lines)
    if found := _first(_DATASET, text):
        load = f"python -c 'import datasets; datasets.load_dataset(\"{found}\")'"
        return _said("dataset", found, load)
    found = _first(_MODEL, text)
    if not found:
        try:
            script = read_file(run / NODE_SCRIPT).decode(errors="replace")
        except OSError:
            return None
        found = _first((_OPTION,), script)
    return _said("model", found, f"hf download {found}") if found else None


def _first(patterns: Iterable[str], text: str) -> str:
    return next((m["name"] for p in patterns if (m := re.search(p, text))), "")


def _said(kind: str, name: str, command: str) -> tuple[str, str]:
    return (
        f"the node has no internet access (or is offline), and the {kind} {name} is not in its "
        "Hugging Face cache",
        f"on the login node: {command} ({_SHARED}); then trnslurm resume",
    )
