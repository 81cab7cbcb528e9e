"""exporter: export active runs to Prometheus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click

from trnslurm.cli.options import workspace_option
from trnslurm.config.search import Workspace
from trnslurm.errors import TrnslurmError
from trnslurm.runs.search import RunFilter, list_statuses
from trnslurm.trackers.openmetrics import CONTENT_TYPE, exposition

_HOST = "127.0.0.1"
_EVERY_S = 30.0


@click.command("exporter")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Serve the metrics at http://HOST:PORT/metrics."
)
@click.option("--host", default=_HOST, metavar="ADDRESS", help="With --port: address to listen on.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the metrics to this file, for node_exporter's textfile collector.",
)
@click.option(
    "--every",
    type=click.FloatRange(min=5.0),
    metavar="S",
    help="With --output: rewrite the file after this many seconds. With --port: read the runs at "
    "most once in this many seconds.  [default: 30]",
)
@click.option("--dashboard", is_flag=True, help="Print a Grafana dashboard instead.")
@workspace_option
def exporter_command(
    port: int | None,
    host: str,
    output: Path | None,
    every: float | None,
    dashboard: bool,
    workspace: Workspace,
) -> None:
    """Export metrics of active runs and their nodes to Prometheus.

    Without --port or --output, it prints the metrics once.

    \b
    Example:
      trnslurm exporter
      trnslurm exporter --port 9469
      trnslurm exporter --output /var/lib/node_exporter/trnslurm.prom --every 30
      trnslurm exporter --dashboard > dashboard.json
    """
    if sum(map(bool, (port is not None, output, dashboard))) > 1:
        raise click.UsageError("--port, --output and --dashboard: pass only one of them")
    if every is not None and port is None and not output:
        raise click.UsageError("--every requires --output or --port")
    if dashboard:
        from trnslurm.trackers.grafana import dashboard_text

        click.echo(dashboard_text())
        return

    def told() -> str:
        statuses, _ = list_statuses(workspace, RunFilter(everything=True))
        return exposition([status for status in statuses if not status.final])

    if output:
        _write(output, told())
        while every is not None:
            time.sleep(every)
            _write(output, told())
        return
    if port is None:
        click.echo(told(), nl=False)
        return
    _serve(host, port, _Remembered(told, every or _EVERY_S))


class _Remembered:
    """A text that is regenerated when it is too old."""

    def __init__(self, make: Callable[[], str], every_s: float) -> None:
        self._make, self._every_s = make, every_s
        self._text, self._until = "", 0.0

    def __call__(self) -> str:
        if time.monotonic() >= self._until:
            self._text = self._make()
            self._until = time.monotonic() + self._every_s
        return self._text


def _write(file: Path, text: str) -> None:
    """Replace the file atomically, because node_exporter may read it at any time."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise TrnslurmError(f"{file}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _serve(host: str, port: int, told: Callable[[], str]) -> None:
    """Answer requests one after another until the user stops the program."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # of a client that says nothing

        def do_GET(self) -> None:
            """Answer with the metrics."""
            if self.path.partition("?")[0] not in ("/", "/metrics"):
                self.send_error(404)
                return
            try:
                code, text = 200, told()
            except TrnslurmError as error:
                code, text = 503, f"{error}\n"
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", CONTENT_TYPE if code == 200 else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Log no requests."""

    try:
        server = HTTPServer((host, port), Handler)
    except OSError as error:
        raise TrnslurmError(f"{host}:{port}: {error.strerror}") from None
    with server:
        click.echo(
            f"Serving http://{host}:{server.server_address[1]}/metrics; press Ctrl-C to stop"
        )
        server.serve_forever()
