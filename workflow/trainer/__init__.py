"""Interface of trainers. ortflow's trainer, `graph`, trains ONNX graphs; packages may provide others.

A run file names a trainer (`trainer.name`); an entry point of the group `ortflow.trainers` names its `TrainerBuilder`.
The seven steps use only the protocols. A builder checks machines (`check_machine`), creates what all ranks read
(`prepare`) and opens the `Trainer`, which trains (`step`), evaluates (`evaluate`) and writes the model (`export`), and
may have further `capabilities`. docs/trainers.md shows the order of the calls and a trainer of 150 lines.
"""

from ortflow.workflow.data.inputs import MicroBatch
from ortflow.workflow.trainer_protocol.builder import (
    Metrics,
    Prepared,
    Report,
    Scoring,
    TrainerBuilder,
    TrainerContext,
)
from ortflow.workflow.trainer_protocol.outcomes import EvaluationOutcome, StepOutcome
from ortflow.workflow.trainer_protocol.trainer import Trainer

__all__ = [
    "EvaluationOutcome",
    "Metrics",
    "MicroBatch",
    "Prepared",
    "Report",
    "Scoring",
    "StepOutcome",
    "Trainer",
    "TrainerBuilder",
    "TrainerContext",
]
