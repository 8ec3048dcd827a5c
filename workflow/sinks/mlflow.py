"""A run of MLflow, which every attempt of the run continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from ortflow.workflow.sinks.protocol import Run, State
from ortflow.workflow.spec.sinks import MlflowSink

TAG = "ortflow.run"
STATUS = {"finished": "FINISHED", "preempted": "SCHEDULED", "failed": "FAILED"}
LONGEST = 500
"""Characters of a parameter's value that every store of MLflow takes."""


class Mlflow:
    """The sink of an `MlflowSink` section. Raises MLflow's errors."""

    def __init__(self, section: MlflowSink) -> None:
        self._section = section

    def begin(self, run: Run) -> None:
        """Find the run that an earlier attempt has made, or make it, with the run file's keys as parameters."""
        client = self._client = MlflowClient(tracking_uri=self._section.tracking_uri)
        experiment = client.get_experiment_by_name(self._section.experiment)
        number = client.create_experiment(self._section.experiment) if experiment is None else experiment.experiment_id
        earlier = client.search_runs([number], filter_string=f"tags.`{TAG}` = '{run.identity}'", max_results=1)
        if earlier:
            self._id = earlier[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return
        self._id = client.create_run(number, run_name=run.name, tags={TAG: run.identity}).info.run_id
        parameters = [Param(key, value[:LONGEST]) for key, value in flat(run.settings).items()]
        for start in range(0, len(parameters), 100):  # MLflow's limit for one call
            client.log_batch(self._id, params=parameters[start : start + 100])

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._client.log_batch(
            self._id, metrics=[Metric(name, value, int(time * 1000), step) for name, value in values.items()]
        )

    def end(self, state: State) -> None:
        """Set the run's status."""
        self._client.set_terminated(self._id, STATUS[state])


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings by key path: `train.optimizer.lr`. Pure."""
    values: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            values.update(flat(value, f"{prefix}{key}."))
        else:
            values[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return values
