"""What is told of the nodes' use: usage, status, the exporter for Prometheus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from trnslurm.contract.files import write_json
from trnslurm.records.run import RunDir
from trnslurm.top.look import view_of
from trnslurm.trackers.grafana import dashboard_text

from ..toy_site import write_attempt

TOY = ("submit", "toy", "--cluster", "pc", "--nodes", "2")
LINE = {
    "phase": "train",
    "attempt": 1,
    "cpu": 0.12,
    "memory_left_gib": 310.0,
    "memory_gib": 480.0,
    "net_in_mb_s": 1.25,
    "net_out_mb_s": 0.5,
    "kind": "GPU",
    "devices": [0, 1],
    "device_memory_gib": [70.1, 70.0],
}


@pytest.fixture
def run(graphs, site, fake_slurm, cli) -> RunDir:
    """A training that runs on two nodes."""
    graphs.fill(graphs.facts(cli, "toy", "--nodes", "2"))
    assert cli(*TOY).code == 0
    run = site.run()
    write_attempt(run, "train", 1, state="RUNNING", job_id="1001", hosts="c-1,c-2")
    fake_slurm.queue("1001|RUNNING|None|N/A|")
    return run


def note(run: RunDir, node: int, **figures: Any) -> None:
    """Note a minute of a node."""
    file = run.usage_file(node)
    file.parent.mkdir(exist_ok=True)
    line = LINE | {"time": time.time(), "host": f"c-{node + 1}", **figures}
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"{json.dumps(line)}\n")


def notice(run: RunDir, node: int, text: str, until: float | None = None) -> None:
    notices = [{"text": text, "since": 5.0, "until": until}]
    facts = {"host": f"c-{node + 1}", "notices": notices}
    write_json(run.notices_file("train", 1, node), facts)


def test_usage_of_every_node(run: RunDir, cli, stable) -> None:
    assert "no node of" in cli("usage", "last").error
    note(run, 0, device_use=[0.96, 0.94])
    note(run, 1, device_use=[0.5, None], attempt=7)  # of another attempt
    note(run, 1, device_use=[0.5, None])
    notice(run, 0, "/dev/shm has 10 MiB left")
    said = cli("usage", "last").out.splitlines()
    assert said[0].split()[:4] == ["node", "host", "devices", "device"]
    assert said[1].split()[:4] == ["0", "c-1", "95%", "70.1"]
    assert said[3] == "c-1: /dev/shm has 10 MiB left"
    assert said[4].startswith("c-2: its GPUs compute 50% of the time, compared to 95%")
    status = cli("status", "last").out
    assert "use: GPUs 50% to 95%, processors 12%, memory left 310 GiB, network 1.2 MB/s" in status
    assert said[3] in status
    facts = json.loads(cli("usage", "last", "--json").out)
    stable.json("usage", facts)
    assert facts["nodes"][1]["devices"] == 0.5 and facts["notices"][0] == said[3]


def test_usage_of_the_nodes_of_servers(run: RunDir, cli) -> None:
    server = {"address": "", "stand": "ready", "since": 0, "starts": 1, "log": 3, "why": ""}
    write_json(run.servers_file, {"judge": [server | {"host": "c-3"}, server | {"host": "c-4"}]})
    note(run, 0)
    for number in (0, 1):
        file, line = run.usage_file(number, "judge"), {**LINE, "phase": "judge", "host": "c-4"}
        file.write_text(json.dumps(line | {"time": time.time(), "cpu": 0.9}) + "\n")
    facts = {"host": "c-4", "notices": [{"text": "hot", "since": 5.0, "until": None}]}
    write_json(run.notices_file("judge", 3, 1), facts)
    said = cli("usage", "last").out
    assert [line.split()[:3] for line in said.splitlines()[1:3]] == [
        ["0", "c-1", "70.1"], ["judge", "1", "c-4"]
    ]  # fmt: skip
    assert "c-4: hot" in said and "90%" in said
    assert "use: processors 12%, " in cli("status", "last").out


def test_the_keys_of_status_and_metrics(run: RunDir, fake_slurm, cli, stable) -> None:
    note(run, 0, device_use=[0.96, 0.94])
    with run.script("train").open("a") as script:
        script.write("# --spares=1 \n")
    write_json(run.mirror_file, {"place": "s3://bucket/runs"})
    before = {"nodes": 2, "jobs": {}, "state": "FAILED", "reason": "", "resumed": "2026-01-01"}
    run.write_record(replace(run.record(), history=(before,)))
    run.metrics_file.write_text('{"attempt": 1, "step": 1, "steps": 9, "loss": 2.0, "time": 5.0}\n')
    running = json.loads(cli("status", "last", "--json").out)
    write_attempt(run, "train", 1, state="FAILED", hosts="c-1,c-2")
    write_json(run.failed_file("train", 1, 0), {"time": 5.0, "rank": 0, "error": "ValueError: x"})
    fake_slurm.queue("")
    failed = json.loads(cli("status", "last", "--json").out)
    free = ["metrics", "precompile", "values", "history[].jobs"]
    stable.json("runs", json.loads(cli("runs", "--json").out), free=[f"[].{key}" for key in free])
    stable.json("metrics", json.loads(cli("metrics", "last", "--json").out))
    write_json(run.project_file, {})
    checkpoint = run.path / "work/out/checkpoint-9"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{\n}\n")
    os.utime(checkpoint / "trainer_state.json", 2 * (time.time() - 600,))
    write_attempt(run, "train", 2, state="RUNNING", checkpoint=1)
    with run.metrics_file.open("a") as lines:
        lines.write('{"attempt": 2, "step": 1}\n')
    of_a_script = json.loads(cli("status", "last", "--json").out)
    age_s = of_a_script["saved"].pop("age_s")
    assert 600 <= age_s < 700
    assert of_a_script["saved"] == {
        "name": "checkpoint-9", "form": "Trainer", "path": str(checkpoint), "step": 9,
        "taken": False,
    }  # fmt: skip
    of_a_script["saved"]["age_s"] = age_s
    stable.json("status", running, failed, of_a_script, free=free)


def test_the_keys_of_profile(run: RunDir, cli, stable, monkeypatch) -> None:
    monkeypatch.setattr("trnslurm.cli.profile.ask", lambda *_, **__: "asked")
    file = run.profile_file("asked", 0, "summary.json")
    file.parent.mkdir(parents=True)
    write_json(file, {"host": "c-1", "steps": 3, "seconds": 1.5, "shares": {"compute": 1.0}})
    stable.json("profile", json.loads(cli("profile", "last", "--json").out), free=["[].shares"])


def test_what_was_recorded_by_a_run_that_has_ended(run: RunDir, fake_slurm, cli) -> None:
    write_attempt(run, "train", 1, state="FAILED", hosts="c-1,c-2")
    fake_slurm.queue("")
    assert "`profile` requires a running job that is training" in cli("profile", "last").error
    file = run.profile_file("recipe", 10, "summary.json")
    file.parent.mkdir(parents=True)
    write_json(file, {"host": "c-1", "steps": 3, "seconds": 1.5, "shares": {"data": 1.0}})
    said = cli("profile", "last")
    assert (said.code, said.out) == (0, "worker 10 on c-1, 3 steps in 1.50 s:\n  data 100%\n")


def test_what_is_over_is_not_told(run: RunDir, cli) -> None:
    note(run, 0, time=5.0, device_use=[0.9])
    note(run, 1, time=5.0, device_use=[0.1])
    notice(run, 1, "GPU 1 did nothing", until=9.0)
    said = cli("status", "last").out
    assert "use:" not in said and "GPU" not in said


@pytest.mark.parametrize(
    "line",
    [
        '{"phase": "train", "attempt": 1, "time": 1e99}',
        "null",
        "[]",
        '{"phase": "train", "attempt": 1, "host": "\\u001b[31m"}',
    ],
)
def test_odd_files_do_no_harm(run: RunDir, cli, line: str) -> None:
    note(run, 0)
    run.usage_file(1).write_text(f"{line}\n")
    run.notices_file("train", 1, 1).write_text('{"notices": [3, {"text": 5, "since": 1}, null]}')
    run.usage_file("x").write_text("")
    found = cli("usage", "last")
    assert found.code == 0 and "\x1b" not in found.out


def samples(text: str) -> dict[str, dict[str, float]]:
    """Read a text with the parser of Prometheus' own client."""
    families = [*text_string_to_metric_families(text)]
    assert all(family.documentation for family in families)
    return {
        f.name: {",".join(sample.labels.values()): sample.value for sample in f.samples}
        for f in families
    }


def test_prometheus_reads_it(run: RunDir, cli) -> None:
    note(run, 0, device_use=[0.96, 0.94])
    run.metrics_file.write_text('{"attempt": 1, "step": 3, "loss": null, "time": 7}\n')
    found = samples(cli("exporter").out)
    about = f"{run.name},toy,pc"
    assert found["trnslurm_run_step"] == {about: 3.0}
    assert found["trnslurm_run_state"] == {f"{about},RUNNING": 1.0}
    assert found["trnslurm_node_devices_ratio"] == {f"{about},0,c-1": 0.95}
    assert found["trnslurm_node_net_in_bytes_per_second"] == {f"{about},0,c-1": 1.25e6}
    assert "trnslurm_run_loss" not in found


def test_it_is_served_and_written(run: RunDir, cli, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trnslurm", "exporter"]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        address = server.stdout.readline().split()[1].rstrip(";")
        with urlopen(address) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert samples(answer.read().decode())["trnslurm_run_state"]
        server.terminate()
    file = tmp_path / "trnslurm.prom"
    assert cli("exporter", "--output", file).code == 0
    file.write_text("")
    again = [*command, "--output", str(file), "--every", "5"]
    with subprocess.Popen(again) as writer:
        while not file.read_text():
            assert writer.poll() is None
            time.sleep(0.05)
        writer.terminate()
    assert file.read_text().endswith("# EOF\n") and [*tmp_path.glob("*trnslurm.prom*")] == [file]


def test_exporter_is_refused(run: RunDir, cli, tmp_path: Path) -> None:
    gone = tmp_path / "gone" / "x.prom"
    assert cli("exporter", "--output", str(gone)).error == f"{gone}: No such file or directory"
    assert "--every requires" in cli("exporter", "--every", "5").error
    assert "pass only one of them" in cli("exporter", "--port", "1", "--dashboard").error


def test_the_dashboard_shows_what_is_exported(run: RunDir, cli) -> None:
    note(run, 0, device_use=[0.9], device_power_w=[1.0], fabric_in_mb_s=1.0, fabric_out_mb_s=1.0)
    line = {"attempt": 1, "step": 3, "steps": 9, "loss": 1.0, "time": 7, "step_s": 1.0}
    line |= {"tokens_per_s": 1.0, "samples_per_s": 1.0, "mfu": 0.4}
    run.metrics_file.write_text(f"{json.dumps(line)}\n")
    exported = samples(cli("exporter").out)
    panels = json.loads(dashboard_text())["panels"]
    shown = {p["targets"][0]["expr"].partition("{")[0].rpartition("(")[2] for p in panels}
    not_shown = {"trnslurm_run_steps", "trnslurm_run_reported_timestamp_seconds"}
    assert shown == {*exported} - not_shown
    assert {p["id"] for p in panels} == {*range(1, len(panels) + 1)}


def test_the_report_draws_it(run: RunDir, cli, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    for minute in range(3):
        for node in range(2):
            note(run, node, device_use=[0.9, None], time=time.time() + 60 * minute)
    assert cli("report", "last", "-o", page).code == 0
    two = page.read_text()
    assert "Device use" in two and "node 1" in two and "EFA or InfiniBand" not in two
    for node in range(2, 12):
        note(run, node, device_use=[0.5])
    assert cli("report", "last", "-o", page, "--png").code == 0
    assert "median of 12 nodes" in page.read_text()
    assert (tmp_path / "report-device-use.png").stat().st_size > 5000


def test_top_shows_a_line_per_node(run: RunDir) -> None:
    note(run, 0, device_use=[0.9])
    note(run, 1, device_use=[0.8])
    notice(run, 0, "/dev/shm has 10 MiB left")
    facts = view_of(run, lines=3).facts
    assert dict(facts)["use"].startswith("GPUs 80% to 90%")
    rows = [text for name, text in facts if not name]
    assert [row.split()[0] for row in rows] == ["c-1:", "node", "0", "1"]
