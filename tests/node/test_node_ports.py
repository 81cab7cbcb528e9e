"""Rendezvous ports: the same for the same attempt, others for another, never one in use."""

import errno
import socket

import pytest

from trnslurm.node import ports


def chosen(bench, *arguments):
    result = bench.run("ports", *arguments)
    assert result.returncode == 0, result.stderr
    return [int(word) for word in result.stdout.split(" ")]


def test_two_distinct_ports_outside_the_ephemeral_range(bench):
    first, second = chosen(bench, "4711", "0")
    assert first != second
    assert {first, second}.isdisjoint(ports.ephemeral_range())
    assert max(first, second) < 32768


def test_the_same_attempt_gets_the_same_ports(bench):
    assert chosen(bench, "local-2f 'x'", "1") == chosen(bench, "local-2f 'x'", "1")


def test_other_jobs_and_other_restarts_get_other_ports():
    picks = [ports.choose("4711", restart, 2, None) for restart in range(20)]
    picks.append(ports.choose("4712", 0, 2, None))
    assert len({port for pick in picks for port in pick}) == 2 * len(picks)


@pytest.mark.parametrize(
    ("family", "address"),
    [
        (socket.AF_INET, "0.0.0.0"),
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET6, "::1"),
    ],
)
def test_an_occupied_port_is_passed_over(bench, family, address):
    first, second = chosen(bench, "4711", "3")
    with socket.socket(family, socket.SOCK_STREAM) as server:
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            server.bind((address, first))
        except OSError as error:
            if family == socket.AF_INET or error.errno != errno.EADDRNOTAVAIL:
                raise
            pytest.skip(f"no {address} on this host")
        assert chosen(bench, "4711", "3") == [second, second + 1]


def test_count(bench):
    assert len(set(chosen(bench, "4711", "0", "--count", "5"))) == 5


@pytest.mark.parametrize(
    "ephemeral", [range(20500, 60000), range(15000, 65536), range(1024, 60000), range(25000, 61000)]
)
def test_a_wide_ephemeral_range_is_avoided(ephemeral):
    usable = ports.usable_ports(ephemeral)
    assert len(usable) >= ports.MIN_CHOICE
    assert set(usable).isdisjoint(ephemeral)
    assert min(usable) >= 1024


def test_no_port_outside_the_ephemeral_range_is_one_line_of_error(tmp_path, monkeypatch):
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "EPHEMERAL_FILE", tmp_path / "range")
    with pytest.raises(SystemExit, match=r"^error: ports: found 0 of 2 free ports .*$"):
        ports.main(["4711", "0"])


@pytest.mark.parametrize(("address", "words"), [("192.0.2.1", "of this node"), ("x", "numeric")])
def test_a_wrong_address_is_one_line_of_error(bench, address, words):
    result = bench.run("ports", "4711", "0", "--address", address)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: ports: {address} is not ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_address_of_this_node_is_accepted(bench):
    assert chosen(bench, "4711", "0", "--address", "127.0.0.1") == chosen(bench, "4711", "0")


def test_a_restart_count_that_is_no_number_is_a_usage_error(bench):
    assert bench.run("ports", "4711", "").returncode == 2
