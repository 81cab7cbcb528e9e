"""Active runs in the text format of Prometheus and OpenMetrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trnslurm.records.foreign import printable
from trnslurm.records.run import RunDir, is_number
from trnslurm.runs.status import RunStatus
from trnslurm.runs.usage import NodeUsage, usage_of

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_GIB, _MB = 1 << 30, 1e6


class Gauge(NamedTuple):
    """A metric: its name, its meaning, and its value from a run or a node, or None."""

    name: str
    about: str
    value: Callable[[Any], float | None]


def _metric(name: str) -> Callable[[RunStatus], float | None]:
    def value(status: RunStatus) -> float | None:
        found = status.metrics.get(name)
        return float(found) if is_number(found) and found is not None else None

    return value


def _rate(name: str) -> Callable[[NodeUsage], float | None]:
    return lambda node: _times(getattr(node, name), _MB)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


OF_RUN = (
    Gauge("trnslurm_run_step", "The newest step", _metric("step")),
    Gauge("trnslurm_run_steps", "Total steps of the run", _metric("steps")),
    Gauge("trnslurm_run_loss", "The newest loss", _metric("loss")),
    Gauge("trnslurm_run_step_seconds", "Duration of the newest step", _metric("step_s")),
    Gauge("trnslurm_run_tokens_per_second", "Tokens per second", _metric("tokens_per_s")),
    Gauge("trnslurm_run_samples_per_second", "Samples per second", _metric("samples_per_s")),
    Gauge("trnslurm_run_mfu_ratio", "The share of the devices' peak FLOP/s", _metric("mfu")),
    Gauge(
        "trnslurm_run_reported_timestamp_seconds",
        "Time when the newest step was reported",
        _metric("time"),
    ),
    Gauge("trnslurm_run_attempts", "Attempts so far", lambda status: len(status.attempts)),
)
OF_NODE = (
    Gauge(
        "trnslurm_node_devices_ratio",
        "Share of time that devices spent computing",
        lambda n: n.devices,
    ),
    Gauge(
        "trnslurm_node_device_memory_bytes",
        "Memory used on the fullest device",
        lambda n: _times(n.device_memory_gib, _GIB),
    ),
    Gauge("trnslurm_node_device_power_watts", "Power of all devices", lambda n: n.power_w),
    Gauge(
        "trnslurm_node_processors_ratio", "Share of time that processors were busy", lambda n: n.cpu
    ),
    Gauge(
        "trnslurm_node_memory_left_bytes",
        "Memory still available to the job",
        lambda n: _times(n.memory_left_gib, _GIB),
    ),
    *(
        Gauge(
            f"trnslurm_node_{network}_{way}_bytes_per_second",
            f"Bytes per second {said} by {kind}",
            _rate(f"{network}_{way}_mb_s"),
        )
        for network, kind in (("net", "the network"), ("fabric", "EFA or InfiniBand"))
        for way, said in (("in", "received"), ("out", "sent"))
    ),
)
STATE = Gauge("trnslurm_run_state", "1 for the run's current state", lambda _: 1.0)
NOTICES = Gauge("trnslurm_run_notices", "Warnings of trnslurm usage", lambda told: len(told))


def exposition(statuses: Sequence[RunStatus]) -> str:
    """Return the exposition for these runs, and for the nodes of those that are running."""
    active = [(status, usage_of(RunDir(Path(status.path)), status)) for status in statuses]
    lines: list[str] = []
    for gauge in OF_RUN:
        lines += _lines(gauge, ((_of_run(status), status) for status, _ in active))
    states = ((_of_run(status) | {"state": status.state}, status) for status, _ in active)
    lines += _lines(STATE, states)
    lines += _lines(NOTICES, ((_of_run(status), usage.told()) for status, usage in active))
    for gauge in OF_NODE:
        lines += _lines(
            gauge,
            (
                (_of_run(status) | {"node": node.name, "host": node.host}, node)
                for status, usage in active
                for node in usage.nodes
                if usage.now
            ),
        )
    return "\n".join([*lines, "# EOF", ""])


def _of_run(status: RunStatus) -> dict[str, str]:
    return {"run": status.run, "recipe": status.recipe, "cluster": status.cluster}


def _lines(
    gauge: Gauge, about: Iterable[tuple[dict[str, str], RunStatus | NodeUsage | list[str]]]
) -> Iterator[str]:
    samples = [(labels, gauge.value(item)) for labels, item in about]
    known = [(labels, value) for labels, value in samples if value is not None]
    if known:
        yield f"# HELP {gauge.name} {gauge.about}"
        yield f"# TYPE {gauge.name} gauge"
    for labels, value in known:
        words = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        yield f"{gauge.name}{{{words}}} {value!r}"


def _escaped(text: str) -> str:
    return printable(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
