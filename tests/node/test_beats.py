"""Signs of life of nodes, over the loopback interface."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest

from trnslurm.contract.variables import Variable
from trnslurm.node import beats
from trnslurm.node.beats import Beats, Sender, answers

from ..free_port import free_port
from ..waiting import eventually

Make = Callable[[int, int], Sender]


@pytest.fixture
def listens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Beats]:
    found = Beats("127.0.0.1")
    monkeypatch.setenv(Variable.BEATS, found.place)
    found.begin(3)
    yield found
    found.close()


@pytest.fixture
def sender() -> Iterator[Make]:
    made: list[Sender] = []

    def make(attempt: int, node: int) -> Sender:
        made.append(Sender(attempt, node))
        return made[-1]

    yield make
    for each in made:
        each.close()


def heard(listens: Beats) -> set[int]:
    listens.read()
    return set(listens._heard)


def test_a_silent_node(listens: Beats, sender: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was heard, and another one still is."""
    nodes = [sender(3, node) for node in (0, 1)]
    for node in nodes:
        node.send()
    eventually(lambda: heard(listens) == {0, 1})
    monkeypatch.setattr(beats, "SILENT_S", 0.0)
    listens._heard[0] += 60.0  # just now, whatever the time
    assert listens.silent() == [1]
    monkeypatch.setattr(beats, "SILENT_S", 60.0)
    assert listens.silent() == []


def test_the_first_node_answers(listens: Beats, sender: Make) -> None:
    """Also a node of an attempt that was started ahead; not a stranger."""
    node = sender(4, 1)
    node.send()
    eventually(lambda: (listens.read(), node.hears(0.01))[1])
    node._heard -= 60.0
    assert not node.hears(0.0)
    assert node.silent_s >= 59.0


def test_an_answer_causes_no_sign_of_life(listens: Beats, sender: Make, monkeypatch) -> None:
    """Else two nodes would keep each other busy."""
    monkeypatch.setattr(beats, "PERIOD_S", 3600.0)
    node = sender(3, 1)
    monkeypatch.setattr(node, "send", sent := Mock(wraps=node.send))
    assert node.send_if_due() > 3000
    eventually(lambda: heard(listens) == {1})
    for _ in range(3):
        node.told_to_end()
        assert node.send_if_due() > 3000
    assert sent.call_count == 1


def test_all_nodes_are_silent(
    listens: Beats, sender: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the fault is the listener's."""
    sender(3, 1).send()
    eventually(lambda: heard(listens) == {1})
    monkeypatch.setattr(beats, "SILENT_S", -1.0)
    monkeypatch.setattr(beats, "PERIOD_S", -1.0)
    assert listens.silent() == []


def test_what_is_no_sign_of_life(
    listens: Beats, sender: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender(2, 1).send()  # of an earlier attempt
    place = listens.place.rpartition(":")[0]
    monkeypatch.setenv(Variable.BEATS, f"{place}:{'0' * 32}")
    sender(3, 1).send()  # without the secret
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for data in (b"", b"x", b"\xff" * 500):
            stranger.sendto(data, ("127.0.0.1", int(place.rpartition(":")[2])))
    monkeypatch.setenv(Variable.BEATS, listens.place)
    sender(3, 2).send()
    eventually(lambda: 2 in heard(listens))
    assert heard(listens) == {2}


def test_the_others_end(listens: Beats, sender: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the lost one say that they have; a silent one is not waited for without end."""
    monkeypatch.setattr(beats, "_AGAIN_S", 0.05)
    node, lost = sender(3, 0), sender(3, 1)
    node.send()
    lost.send()
    eventually(lambda: heard(listens) == {0, 1})

    def live() -> None:
        eventually(node.told_to_end)
        node.say_ended()

    thread = threading.Thread(target=live)
    thread.start()
    assert listens.end_others([1])
    thread.join()
    monkeypatch.setattr(beats, "_END_WITHIN_S", 0.2)
    assert not listens.end_others([0])


def test_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that refuses is there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert answers("127.0.0.1", server.getsockname()[1])
    assert answers("127.0.0.1", free_port())
    for error in (TimeoutError, OSError(errno.EHOSTUNREACH, "No route to host")):
        monkeypatch.setattr(socket, "create_connection", Mock(side_effect=error))
        assert not answers("10.0.0.1", 6818)
