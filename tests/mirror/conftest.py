"""One server of S3's protocol for the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import Server, serving


@pytest.fixture(scope="session")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("s3") / "server") as server:
        yield server


@pytest.fixture
def server(one_server: Server, home: Path) -> Iterator[Server]:
    """The server without faults, and this home's user as its writer."""
    one_server.gate.heal()
    one_server.be("writer", home)
    yield one_server
    one_server.gate.heal()
