"""Signs of life of nodes: over the loopback interface, and in virtual time."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest

from trnslurm.contract.variables import Variable
from trnslurm.node import beats
from trnslurm.node.attempt.roll import Roll
from trnslurm.node.beats import Beat, Beats, Sender, answers

from ..free_port import free_port
from ..waiting import eventually

Make = Callable[[int, int], Sender]


@pytest.fixture
def listens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Beats]:
    found = Beats("127.0.0.1")
    monkeypatch.setenv(Variable.BEATS, found.place)
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


def heard(listens: Beats, found: list[Beat]) -> list[Beat]:
    found += listens.read()
    return found


def test_the_first_node_answers(listens: Beats, sender: Make) -> None:
    """Also a node of an attempt that was started ahead; not a stranger."""
    node = sender(4, 1)
    node.send()
    eventually(lambda: ([*listens.read()], node.hears(0.01))[1])
    node._heard -= 60.0
    assert not node.hears(0.0)
    assert node.silent_s >= 59.0


def test_an_answer_causes_no_sign_of_life(listens: Beats, sender: Make, monkeypatch) -> None:
    """Else two nodes would keep each other busy."""
    monkeypatch.setattr(beats, "PERIOD_S", 3600.0)
    node, found = sender(3, 1), []
    monkeypatch.setattr(node, "send", sent := Mock(wraps=node.send))
    assert node.send_if_due() > 3000
    eventually(lambda: heard(listens, found) == [(1, 3, False)])
    for _ in range(3):
        node.told_to_end()
        assert node.send_if_due() > 3000
    assert sent.call_count == 1


def test_what_is_no_sign_of_life(
    listens: Beats, sender: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = listens.place.rpartition(":")[0]
    monkeypatch.setenv(Variable.BEATS, f"{place}:{'0' * 32}")
    sender(3, 1).send()  # without the secret
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for data in (b"", b"x", b"\xff" * 500):
            stranger.sendto(data, ("127.0.0.1", int(place.rpartition(":")[2])))
    monkeypatch.setenv(Variable.BEATS, listens.place)
    sender(3, 2).send()
    found: list[Beat] = []
    eventually(lambda: heard(listens, found))
    assert heard(listens, found) == [(2, 3, False)]


def test_a_node_ends_as_it_is_told(listens: Beats, sender: Make) -> None:
    node, found = sender(3, 0), []
    node.send()
    eventually(lambda: heard(listens, found))
    listens.end(3, [0, 1])  # of the second nothing was heard
    eventually(node.told_to_end)
    node.say_ended()
    eventually(lambda: (0, 3, True) in heard(listens, found))


@pytest.fixture
def roll() -> Roll:
    """Three nodes of attempt 3: node 1 was heard at 0 s only, the others at 10 s as well."""
    roll = Roll()
    roll.begin(3, 3, 0.0)
    for at in (0.0, 2.0, 4.0, 6.0, 8.0, 10.0):
        roll.awake(at)
        for node in (0, 1, 2) if not at else (0, 2):
            roll.hear(node, 3, at)
    return roll


def test_a_silent_node(roll: Roll) -> None:
    """Another one is heard. If none is, the fault may be the listener's."""
    assert roll.silent(10.0) == set()  # the first sign of a node may take as long
    assert roll.silent(12.0) == {1}
    assert roll.silent(30.0) == set()
    roll.hear(0, 3, 11.0, ended=True)  # a node whose part has ended is not silent
    roll.hear(2, 2, 29.0)  # of an earlier attempt
    assert roll.silent(30.0) == {1, 2}


def test_nobody_is_silent_because_this_program_stood_still(roll: Roll) -> None:
    roll.awake(12.0)
    roll.hear(0, 3, 60.0)  # of the others, nothing found room in the buffer
    roll.awake(60.0)
    assert roll.silent(60.0) == {1}  # it was so before
    for now in (62.0, 64.0, 66.0, 68.0):
        roll.hear(0, 3, now)
        roll.awake(now)
    assert roll.silent(68.0) == {1, 2}


def test_who_was_started_ahead_is_known_apart(roll: Roll) -> None:
    for node in (0, 1):
        roll.hear(node, 4, 10.0)
    assert roll.all_ahead(2, 11.0) and not roll.all_ahead(3, 11.0) and not roll.all_ahead(2, 20.0)


def test_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that refuses is there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert answers("127.0.0.1", server.getsockname()[1])
    assert answers("127.0.0.1", free_port())
    for error in (TimeoutError, OSError(errno.EHOSTUNREACH, "No route to host")):
        monkeypatch.setattr(socket, "create_connection", Mock(side_effect=error))
        assert not answers("10.0.0.1", 6818)
