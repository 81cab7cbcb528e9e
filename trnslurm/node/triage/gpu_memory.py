"""Finds out from PyTorch's out-of-memory line which process holds the GPU's memory.

CUDACachingAllocator.cpp writes these lines, before and since PyTorch 2.1 (at first with "capacty"):

    Tried to allocate 2.00 GiB (GPU 0; 10.76 GiB total capacity; 9.42 GiB already allocated;
        26.12 MiB free; 9.75 GiB reserved in total by PyTorch)
    Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.20 GiB is free.
        Process 12 has 72.40 GiB memory in use. Including non-PyTorch memory, this process has
        5.50 GiB memory in use. Of the allocated memory 4.10 GiB is allocated by PyTorch, and
        300.00 MiB is reserved by PyTorch but unallocated.
"""

import functools
import re

OWN = "own"
"""This process, as far as the line shows."""
OTHERS = "others"
"""Other processes hold a third of the GPU or more."""
PIECES = "pieces"
"""PyTorch, in pieces that are too small for the requested tensor."""
TENSOR = "tensor"
"""A single tensor needs half of the GPU's memory or more."""

_UNITS = {"bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40, "PiB": 50}
_SIZE = rf"(?<!\d)(\d+(?:\.\d+)?) ({'|'.join(_UNITS)})"
_TRIED = re.compile(rf"Tried to allocate {_SIZE}")
_TOTAL = re.compile(rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity")
_FREE = re.compile(rf"of which {_SIZE} is free|{_SIZE} free;")
_THIS = re.compile(rf"this process has {_SIZE} memory in use")
_PYTORCH = re.compile(rf"{_SIZE} is allocated by PyTorch|{_SIZE} reserved in total")
_SPARE = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_LISTED = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_CONTEXT = 1 << 30
"""The approximate memory of CUDA and NCCL in a process, in addition to PyTorch's."""
_GPU = 100 << 30
"""The size of a GPU, if the line does not say it."""


@functools.lru_cache(maxsize=64)
def holders(line: str) -> frozenset[str]:
    """Return what holds the memory, or an empty set if memory is not short.

    A damaged object asks for more than 1EB when it is unpickled.
    """
    if "more than 1EB" in line:
        return frozenset()
    tried, total, spare = (sum(_sizes(part, line)) for part in (_TRIED, _TOTAL, _SPARE))
    found = {OTHERS if total and _others(line, total) >= total / 3 else OWN}
    if tried >= (total or _GPU) / 2:
        found.add(TENSOR)
    if total and spare >= max(tried, total / 10):
        found.add(PIECES)
    return frozenset(found)


def _others(line: str, total: float) -> float:
    """Return the memory that other processes hold, or 0 if unknown.

    The processes in the line do not help: in a container, this process is among them, under a pid
    that it does not know.
    """
    if own := _sizes(_THIS, line):
        held = sum(own)
    elif own := _sizes(_PYTORCH, line):
        held = sum(own) + sum(_sizes(_SPARE, line)) + _CONTEXT
    else:
        held = max(_sizes(_LISTED, line), default=total)
    return total - sum(_sizes(_FREE, line)) - held


def _sizes(part: re.Pattern[str], line: str) -> list[float]:
    """Return the sizes that a line gives for a part, in bytes."""
    found = (tuple(filter(None, match.groups())) for match in part.finditer(line))
    return [float(number) * 2 ** _UNITS[unit] for number, unit in found]
