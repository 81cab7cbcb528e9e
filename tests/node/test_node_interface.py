"""Gloo's interface: the one that leads to the master, found without iproute2."""

import shutil
import subprocess
import sys

import pytest

# Two networks; of one address there is a second, with a label as some distributions write it.
NETWORKS = """
ip link set lo up
ip link add one type veth peer name two
ip address add 10.77.0.1/24 dev one
ip address add 10.77.1.1/24 dev one label one:1
ip address add 10.77.2.1/24 dev two
ip link set one up
ip link set two up
for address in 10.77.0.1 10.77.0.9 10.77.1.1 10.77.1.9 10.77.2.9 127.0.1.1; do
  "$0" -m trnslurm.node.interface "$address"
done
"""


def test_each_address_has_its_interface(bench) -> None:
    command = ["unshare", "--net", "--user", "--map-root-user", "bash", "-euc", NETWORKS]
    allowed = subprocess.run([*command[:4], "true"], capture_output=True, check=False)
    if allowed.returncode or not shutil.which("ip"):
        pytest.skip("no network namespaces for this user, or no iproute2 to make them")
    process = bench.start(*command, sys.executable)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")
    assert out.split() == ["one", "one", "one", "one", "two", "lo"]


@pytest.mark.parametrize("address", ["", "node-1", "::1"])
def test_what_is_no_address_is_one_line_of_error(bench, address: str) -> None:
    done = bench.run("interface", address)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: no network interface reaches {address}: ")
    assert done.stderr.count("\n") == 1


def test_usage(bench) -> None:
    assert bench.run("interface").returncode == 2
