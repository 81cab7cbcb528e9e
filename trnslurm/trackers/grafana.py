"""A Grafana dashboard for the metrics that `trnslurm exporter` exports to Prometheus."""

from __future__ import annotations

import json
from typing import Any

from trnslurm.trackers.openmetrics import NOTICES, OF_NODE, OF_RUN, STATE

_WIDTH, _HEIGHT = 12, 8
# Units by Grafana's names; "short" has 400000 as 400 K.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "_ratio": {"unit": "percentunit", "min": 0, "max": 1},
    "_bytes": {"unit": "bytes"},
    "_watts": {"unit": "watt"},
    "_bytes_per_second": {"unit": "Bps"},
    "_seconds": {"unit": "s"},
    "": {"unit": "short"},
}
_CHOSEN = '{run=~"$run"}'
_NOT_SHOWN = ("trnslurm_run_steps", "trnslurm_run_reported_timestamp_seconds")


def dashboard_text() -> str:
    """Return the dashboard as JSON, with a panel per metric for the runs selected at its top."""
    of_run = [gauge for gauge in (NOTICES, *OF_RUN) if gauge.name not in _NOT_SHOWN]
    shown = [
        ("Runs by state", f"sum by (state) ({STATE.name}{_CHOSEN})", "{{state}}"),
        *((gauge.about, f"{gauge.name}{_CHOSEN}", "{{run}}") for gauge in of_run),
        *((gauge.about, f"{gauge.name}{_CHOSEN}", "{{run}} {{host}}") for gauge in OF_NODE),
    ]
    panels = [_panel(number, *panel) for number, panel in enumerate(shown)]
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
            "current": {"text": ["All"], "value": ["$__all"]},
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


def _panel(number: int, title: str, query: str, legend: str) -> dict[str, Any]:
    name = query.partition("{")[0]
    defaults = next(each for ending, each in _DEFAULTS.items() if name.endswith(ending))
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {
            "x": number % 2 * _WIDTH,
            "y": number // 2 * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "targets": [{"refId": "A", "expr": query, "legendFormat": legend}],
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }
