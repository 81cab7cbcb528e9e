"""The reference pages are what the code declares today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["api.md", "commands.md", "keys.md", "environment.md"])
def test_it_is_of_this_code(page: str) -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/make/reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert found == module.files()[page], f"docs/{page} is of other code: make goldens"
