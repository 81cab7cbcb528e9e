"""node-setup.sh, run unprivileged against a node made of files and a few fake commands."""

import os
from pathlib import Path

import pytest

from trnslurm.config.catalog import catalog

from ..processes import Done, run_process

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parents[1] / "cluster-config" / "parallelcluster" / "node-setup.sh"

RIGHT = "10.0.0.11 compute-dy-trn1-1.trn1.pcluster compute-dy-trn1-1"
RIGHT_SHORT = "10.0.0.11 compute-dy-trn1-1"
WRONG = "10.0.0.77 compute-dy-trn1-1.trn1.pcluster compute-dy-trn1-1"


def add_program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    path.chmod(0o755)


def make_node(root: Path, *, efa: int = 8, devices: int = 16, hosts: str = WRONG) -> Path:
    (root / "etc").mkdir(parents=True)
    (root / "etc/hosts").write_text(hosts + "\n", encoding="utf-8")
    (root / "reserved_ports").write_text("\n", encoding="utf-8")
    for i in range(efa):
        (root / f"sys/class/infiniband/rdmap{i}s0").mkdir(parents=True)
    (root / "dev").mkdir()
    for i in range(devices):
        (root / f"dev/neuron{i}").touch()
    (root / "opt/aws/neuron/lib").mkdir(parents=True)
    (root / "opt/aws/neuron/lib/libnccom.so.2").touch()
    add_program(root / "opt/aws/neuron/bin/neuron-ls")
    add_program(root / "opt/amazon/efa/bin/fi_info")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "it's a node"


def run(root: Path, *role: str, on: str = "trn1.32xlarge", **environment: str) -> Done:
    path = f"{HERE / 'fake_bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
    own = {"PATH": path, "TRNSLURM_ROOT": str(root), "FAKE_TYPE": on}
    return run_process([SCRIPT, *role], env=own | environment)


def files(root: Path) -> dict[Path, tuple[bytes, int]]:
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file() and path.name != "sysctl.loaded"
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (WRONG, RIGHT),
        (f"{WRONG}\n{RIGHT}", RIGHT),
        (f"{WRONG}\n10.0.0.78 compute-dy-trn1-1", RIGHT),
        ("127.0.0.1 localhost", "127.0.0.1 localhost\n10.0.0.11 compute-dy-trn1-1"),
        (
            "127.0.0.1 localhost compute-dy-trn1-1",
            "127.0.0.1 localhost\n10.0.0.11 compute-dy-trn1-1",
        ),
        ("fe80::1 compute-dy-trn1-1", "10.0.0.11 compute-dy-trn1-1"),
        (f"# 10.0.0.77 compute-dy-trn1-1\n\n{RIGHT}", f"# 10.0.0.77 compute-dy-trn1-1\n\n{RIGHT}"),
        (f"10.0.0.20 compute-dy-trn1-10\n{RIGHT}", f"10.0.0.20 compute-dy-trn1-10\n{RIGHT}"),
    ],
)
def test_own_name_gets_the_primary_address(root: Path, before: str, after: str) -> None:
    make_node(root, hosts=before)
    result = run(root)
    assert result.code == 0, result.err
    assert (root / "etc/hosts").read_text(encoding="utf-8") == after + "\n"


def test_limits_and_kernel_parameters(root: Path) -> None:
    make_node(root)
    (root / "reserved_ports").write_text("44000,48620\n", encoding="utf-8")
    assert run(root).code == 0
    limits = (root / "etc/security/limits.d/99-trnslurm.conf").read_text(encoding="utf-8")
    assert "* - nofile 131072\n" in limits
    assert "* - memlock unlimited\n" in limits
    kernel = (root / "etc/sysctl.d/99-trnslurm.conf").read_text(encoding="utf-8")
    assert "kernel.threads-max = 10000000\n" in kernel
    assert "net.ipv4.ip_local_reserved_ports = 20000-29999,44000,48620\n" in kernel
    assert (root / "sysctl.loaded").read_text(encoding="utf-8") == kernel


def test_second_run_changes_nothing(root: Path) -> None:
    make_node(root)
    before = files(root)
    assert run(root).code == 0
    once = files(root)
    assert once != before
    (root / "reserved_ports").write_text("20000-29999\n", encoding="utf-8")
    once[root / "reserved_ports"] = files(root)[root / "reserved_ports"]
    assert run(root).code == 0
    assert files(root) == once


@pytest.mark.parametrize("efa", [0, 7])
def test_missing_efa_interfaces_fail(root: Path, efa: int) -> None:
    result = run(make_node(root, efa=efa))
    assert result.code == 1
    assert f"error: found {efa} EFA interfaces, expected 8" in result.err
    assert (root / "slept").read_text() == "1\n" * 15


def test_efa_that_comes_late_at_boot(root: Path) -> None:
    result = run(make_node(root, efa=7), FAKE_LATE="rdmap7s0")
    assert (result.code, (root / "slept").read_text()) == (0, "1\n"), result.err


TYPES = [known for known in catalog().values() if not known.device.on_host]


def test_the_table_is_that_of_the_catalog() -> None:
    rows = [f"{t.name} {t.neuron_devices(t.device)} {t.gpus} {t.efa}" for t in TYPES]
    table = SCRIPT.read_text().split("\ntypes='\n")[1].split("\n'\n")[0]
    assert table.splitlines() == rows, "\n".join(rows)


@pytest.mark.parametrize(
    "name", ["trn1n.32xlarge", "trn2.3xlarge", "p4d.24xlarge", "p6-b300.48xlarge", "g6e.xlarge"]
)
def test_a_node_needs_the_devices_of_its_own_type(root: Path, name: str) -> None:
    """Whatever the cluster file says of it: earlier files name one of a few types."""
    [known] = [known for known in TYPES if known.name == name]
    neuron, gpus = known.neuron_devices(known.device), known.gpus
    make_node(root, efa=known.efa, devices=neuron)
    for role in ((), ("trn1",)):
        result = run(root, *role, on=name, FAKE_GPUS=str(gpus))
        assert result.code == 0, result.err
        assert f"instance type {name}\n" in result.out
    if known.efa:
        make_node(root / "other", efa=known.efa - 1, devices=neuron)
        result = run(root / "other", on=name, FAKE_GPUS=str(gpus))
        assert result.code == 1
        assert f"found {known.efa - 1} EFA interfaces, expected {known.efa}" in result.err


def test_gpus_are_counted(root: Path) -> None:
    make_node(root, efa=32, devices=0)
    result = run(root, on="p5.48xlarge", FAKE_GPUS="7")
    assert result.code == 1
    assert "nvidia-smi lists 7 GPUs, expected 8" in result.err and "1 problem(s)" in result.err
    assert "nvidia-smi lists 0 GPUs, expected 8" in run(root, on="p5.48xlarge", FAKE_GPUS="0").err


def test_a_type_that_is_not_in_the_table_is_not_refused(root: Path) -> None:
    result = run(make_node(root, efa=0, devices=0), on="p9.48xlarge")
    assert result.code == 0
    assert "p9.48xlarge: not in the table of this script" in result.out


def test_all_problems_are_named_in_one_run(root: Path) -> None:
    make_node(root, efa=0, devices=0)
    (root / "opt/aws/neuron/lib/libnccom.so.2").unlink()
    (root / "opt/aws/neuron/bin/neuron-ls").unlink()
    (root / "opt/amazon/efa/bin/fi_info").unlink()
    result = run(root)
    assert result.code == 1
    for part in ("16", "libnccom.so", "neuron-ls", "EFA interfaces", "fi_info"):
        assert part in result.err
    assert "5 problem(s)" in result.err


@pytest.mark.parametrize("role", ["head", "cpu"])
def test_other_roles_need_no_devices(root: Path, role: str) -> None:
    result = run(make_node(root, efa=0, devices=0), role)
    assert result.code == 0, result.err
    assert (root / "etc/hosts").read_text(encoding="utf-8") == RIGHT + "\n"


def test_no_metadata_service(root: Path) -> None:
    result = run(make_node(root), FAKE_IMDS="down")
    assert result.code == 1
    assert "error: no primary IPv4 address" in result.err
    assert (root / "etc/hosts").read_text(encoding="utf-8") == WRONG + "\n"


def test_long_name_is_a_warning(root: Path) -> None:
    result = run(make_node(root), FAKE_FQDN="compute-dy-trn1-1." + "n" * 46)
    assert result.code == 0
    assert "has 64 characters, Neuron takes 63" in result.out


def test_failing_command_is_named(root: Path) -> None:
    make_node(root)
    (root / "etc/hosts").unlink()
    result = run(root)
    assert result.code != 0
    assert "error: line " in result.err
    assert not (root / "etc/hosts").exists()
