"""Checks whether a server is ready: by HTTP, by TCP, or by a file that it writes."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request
from pathlib import Path

from trnslurm.contract.roles import TCP

_ANSWER_S = 5.0
_MOST_BYTES = 4096


def why_not_ready(ready: str, address: str, directory: Path) -> str:
    """Return why a server is not ready, or an empty string if it is.

    `ready` may contain {host} and {port} of its address. A file's path is relative to `directory`.
    """
    host, _, port = address.rpartition(":")
    place = ready.replace("{host}", host).replace("{port}", port)
    if place.startswith(("http://", "https://")):
        return _by_http(place)
    if place == TCP or place.startswith(f"{TCP}://"):
        return _by_tcp(place.removeprefix(TCP).removeprefix("://") or address)
    return "" if (directory / place).exists() else f"{place} does not exist"


def _by_http(url: str) -> str:
    # Ignore proxies from the environment: a server is on a node of the same job.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ANSWER_S) as answer:
            answer.read(_MOST_BYTES)
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"{url} responded {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        return f"{url}: {getattr(why, 'strerror', None) or why}"


def _by_tcp(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S):
            return ""
    except (OSError, ValueError) as error:
        return f"{address}: {getattr(error, 'strerror', None) or error}"
