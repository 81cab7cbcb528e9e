"""Who holds a GPU's memory, by the numbers of public out-of-memory lines."""

import pytest

from trnslurm.node.triage.gpu_memory import OTHERS, OWN, PIECES, TENSOR, holders

_FULL = (
    "GPU 0 has a total capacity of 39.49 GiB of which 321.31 MiB is free. Process 37 has 414.00 "
    "MiB memory in use. Including non-PyTorch memory, this process has 37.46 GiB memory in use. "
    "Process 39 has 414.00 MiB memory in use. Of the allocated memory 36.04 GiB is allocated by "
    "PyTorch, and 321.37 MiB is reserved by PyTorch but unallocated."
)
_IN_CONTAINER = (
    "GPU 0 has a total capacity of 79.15 GiB of which 141.25 MiB is free. Process 21 has 78.99 GiB "
    "memory in use. Of the allocated memory {} GiB is allocated by PyTorch, and {} is reserved by "
    "PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("tried", "rest", "expected"),
    [
        ("60.00 MiB", "(GPU 0; 11.17 GiB total capacity; 505.96 MiB already allocated; 12.50 MiB "
         "free; 530.00 MiB reserved in total by PyTorch)", {OTHERS}),
        ("20.00 MiB", "(GPU 0; 7.93 GiB total capacity; 2.81 GiB already allocated; 25.38 MiB "
         "free; 3.06 GiB reserved in total by PyTorch)", {OTHERS}),
        ("2.00 MiB", "(GPU 0; 6.00 GiB total capacity; 4.88 GiB already allocated; 0 bytes free; "
         "4.96 GiB reserved in total by PyTorch)", {OWN}),
        ("23.11 GiB", "(GPU 0; 23.70 GiB total capacity; 1.54 GiB already allocated; 20.83 GiB "
         "free; 1.87 GiB reserved in total by PyTorch)", {OWN, TENSOR}),
        ("572.00 MiB", _FULL, {OWN}),
        ("32.00 MiB", "GPU 0 has a total capacty of 4.00 GiB of which 41.56 MiB is free. "
         "Including non-PyTorch memory, this process has 3.44 GiB memory in use.", {OWN}),
        ("386.00 MiB", "GPU 0 has a total capacity of 23.64 GiB of which 21.06 MiB is free. "
         "Process 11 has 5.88 GiB memory in use. Process 12 has 5.88 GiB memory in use.", {OTHERS}),
        ("336.00 MiB", _IN_CONTAINER.format("77.21", "283.51 MiB"), {OWN}),
        ("9.00 GiB", _IN_CONTAINER.format("50.12", "24.31 GiB"), {OWN, PIECES}),
        ("40.00 GiB", _IN_CONTAINER.format("50.12", "24.31 GiB"), {OWN, TENSOR}),
        ("125.00 GiB", "", {OWN, TENSOR}),
        ("more than 1EB memory", "", set()),
        ("... GiB", "of 1.2.3 GiB total capacity", {OWN}),
    ],
)  # fmt: skip
def test_the_numbers_say_who_holds_the_memory(tried: str, rest: str, expected: set[str]) -> None:
    line = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. {rest}"
    assert holders(line) == expected
    assert holders("RuntimeError: CUDA error: out of memory") == {OWN}
