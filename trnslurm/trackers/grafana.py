"""A dashboard for Grafana, of the metrics that `trnslurm exporter` gives to Prometheus."""

from __future__ import annotations

import json
from typing import Any

from trnslurm.trackers.openmetrics import OF_NODE, OF_RUN

_WIDTH, _HEIGHT = 12, 8
# Grafana's names for units.
_UNITS = {
    "_ratio": "percentunit",
    "_bytes": "bytes",
    "_watts": "watt",
    "_bytes_per_second": "Bps",
    "_seconds": "s",
}
_NOT_SHOWN = ("trnslurm_run_steps", "trnslurm_run_reported_timestamp_seconds")


def dashboard_text() -> str:
    """Return the dashboard as JSON: a panel for each metric, for the runs chosen at its top."""
    gauges = [gauge for gauge in (*OF_RUN, *OF_NODE) if gauge.name not in _NOT_SHOWN]
    panels = [
        _panel(number, gauge.name, gauge.about, of_node=gauge in OF_NODE)
        for number, gauge in enumerate(gauges)
    ]
    variables = [
        {
            "name": "datasource",
            "type": "datasource",
            "query": "prometheus",
            "label": "Prometheus",
        },
        {
            "name": "run",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": "label_values(trnslurm_run_state, run)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "sort": 2,
        },
    ]
    return json.dumps(
        {
            "title": "trnslurm",
            "uid": "trnslurm",
            "schemaVersion": 39,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "templating": {"list": variables},
            "panels": panels,
        },
        indent=2,
    )


def _panel(number: int, name: str, about: str, *, of_node: bool) -> dict[str, Any]:
    units = [unit for ending, unit in _UNITS.items() if name.endswith(ending)]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": about,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {
            "x": number % 2 * _WIDTH,
            "y": number // 2 * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "targets": [
            {
                "refId": "A",
                "expr": f'{name}{{run=~"$run"}}',
                "legendFormat": "{{run}} {{host}}" if of_node else "{{run}}",
            }
        ],
        "fieldConfig": {"defaults": {"unit": units[-1]} if units else {}, "overrides": []},
    }
