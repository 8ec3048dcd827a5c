"""The table of classes: the name of each label's number, as the plan records it."""

from __future__ import annotations

from ortflow.workflow.data.samples import Classified, Samples


def classes_of(samples: Samples) -> dict[str, str]:
    """Number -> name, as the plan records it; empty if the labels have no names."""
    names = samples.classes if isinstance(samples, Classified) else ()
    return {str(number): name for number, name in enumerate(names)}
