"""Ways to divide a model over up to four ranks: name -> ranks, and the section `parallel` of a run file."""

from __future__ import annotations

from typing import Any

INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
PARALLEL: dict[str, tuple[int, dict[str, Any]]] = {
    "data-2": (2, {}),
    "data-4": (4, {}),
    "zero-1": (2, {"zero": 1}),
    "zero-2": (2, {"zero": 2}),
    "zero-3": (2, {"zero": 3}),
    "zero-3-of-4": (4, {"zero": 3}),
    "pipeline-2": (2, {"pipeline": 2}),
    "gpipe-2": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "interleaved-2": (2, {"pipeline": 2, **INTERLEAVED}),
    "pipeline-3": (3, {"pipeline": 3}),
    "gpipe-3": (3, {"pipeline": 3, "schedule": "gpipe"}),
    "interleaved-3": (3, {"pipeline": 3, **INTERLEAVED}),
    "pipeline-4": (4, {"pipeline": 4}),
    "gpipe-4": (4, {"pipeline": 4, "schedule": "gpipe"}),
    "interleaved-4": (4, {"pipeline": 4, **INTERLEAVED}),
    "data-2-pipeline-2": (4, {"data": 2, "pipeline": 2}),
    "data-2-pipeline-2-zero-1": (4, {"data": 2, "pipeline": 2, "zero": 1}),
    "horizontal-2": (2, {"horizontal": 2}),
    "data-2-horizontal-2": (4, {"data": 2, "horizontal": 2}),
    "data-2-horizontal-2-zero-2": (4, {"data": 2, "horizontal": 2, "zero": 2}),
    "pipeline-2-horizontal-2": (4, {"pipeline": 2, "horizontal": 2}),
    "sequence-2": (2, {"horizontal": 2, "sequence_parallel": True}),
    "pipeline-2-sequence-2": (4, {"pipeline": 2, "horizontal": 2, "sequence_parallel": True}),
}
