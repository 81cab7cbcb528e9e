"""Sends runs to MLflow at MLFLOW_TRACKING_URI. For a server, mlflow-skinny is enough."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

# By default MLflow retries for minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # we print it

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from trnslurm.contract.states import State
from trnslurm.errors import TrnslurmError
from trnslurm.trackers.send import LATE, Subject, numbers_of, remote_name

REFUSALS = (MlflowException, OSError)
_MOST_METRICS, _MOST_PARAMS, _LONGEST = 1000, 100, 500  # in one call, which every server accepts
_RUN, _STEP = "trnslurm.run", "trnslurm.step"
_STATUS = {State.COMPLETED: "FINISHED", State.CANCELLED: "KILLED"}


class Run:
    """An MLflow run: the existing one with this run's name, or a new one."""

    takes_late = True

    def __init__(self, subject: Subject) -> None:
        name = subject.name
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            raise TrnslurmError(
                "--to mlflow: set MLFLOW_TRACKING_URI to the address of the server, for example "
                "http://host:5000"
            )
        experiment = subject.project or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        experiment = experiment or subject.recipe
        self._client = client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(experiment)
        self._experiment = found.experiment_id if found else client.create_experiment(experiment)
        known = f"tags.`{_RUN}` = '{remote_name(name)}'"
        runs = client.search_runs([self._experiment], known, max_results=1)
        if runs:
            run = runs[0]
        else:
            run = client.create_run(
                self._experiment, tags={_RUN: remote_name(name), _STEP: "0"}, run_name=name
            )
            params = [Param(key, str(value)[:_LONGEST]) for key, value in subject.config.items()]
            for start in range(0, len(params), _MOST_PARAMS):
                client.log_batch(run.info.run_id, params=params[start : start + _MOST_PARAMS])
        self._id = run.info.run_id
        place = urlsplit(uri)
        host = place.netloc.rpartition("@")[2]  # without a password
        page = f"{place.scheme}://{host}/#/experiments/{self._experiment}/runs/{self._id}"
        self._where = page if host else f"{uri}, experiment {experiment}"
        said = run.data.tags.get(_STEP, "")
        self.last = int(said) if said.isdecimal() else 0
        words = {"mlflow.note.content": subject.note, "trnslurm.nodes": str(subject.nodes)}
        words |= {f"trnslurm.{key}": tag for key, tag in subject.tags.items()}
        client.log_batch(self._id, tags=[RunTag(key, value) for key, value in words.items()])

    def log(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Log these steps. Each call also records the last step, for a later send."""
        metrics: list[Metric] = []
        last = self.last
        for step in steps:
            moment = round(1000 * float(step.get("time") or time.time()))
            mine = [
                Metric(name, float(value), moment, each["step"])
                for each in (step, step.get(LATE) or {})
                for name, value in numbers_of(each).items()
            ]
            if len(metrics) + len(mine) > _MOST_METRICS:
                self._write(metrics, last)
                metrics = []
            metrics += mine
            last = step["step"]
        self._write(metrics, last)

    def _write(self, metrics: Sequence[Metric], last: int) -> None:
        if metrics:
            self._client.log_batch(self._id, metrics=metrics, tags=[RunTag(_STEP, str(last))])

    def close(self, state: State) -> str:
        """Record the state of the run, and return where its steps can be seen."""
        self._client.set_tag(self._id, "trnslurm.state", state)
        if state.final:
            self._client.set_terminated(self._id, _STATUS.get(state, "FAILED"))
        else:
            self._client.update_run(self._id, "RUNNING")
        return self._where
