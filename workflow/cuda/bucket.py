"""The end of a gradient bucket in the backward pass: see `ortflow.workflow.fusion.buckets`.

BucketReady (gradients of the bucket, fp32..., token of the bucket before?) -> token fp32 [1], of no meaning.
`gradients` is how many there are, `bucket` the number that `Operators.on_bucket` gets; -1 for a part of a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.registry import operator


@operator()
class BucketReady:
    """See the module."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._bucket, self._gradients = int(attributes["bucket"]), int(attributes["gradients"])

    def run(self, call: Call) -> None:
        """Computes nothing."""
        call.output(0, (1,))
        pointers = [call.given(place).pointer for place in range(self._gradients)]
        call.ready(self._bucket, pointers)
