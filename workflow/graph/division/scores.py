"""Look-ups and losses over a vocabulary of which each part has a share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

from ortflow.workflow.graph.ir.collective import Kind
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.shared_entropy import note
from ortflow.workflow.graph.rules.cut import Cut
from ortflow.workflow.graph.rules.facts import Facts

if TYPE_CHECKING:
    from ortflow.workflow.graph.division.rewrite import PartWriter


class Scores:
    """Writes the replacement of one node."""

    def __init__(self, write: PartWriter) -> None:
        self._write = write

    def _own(self, places: str, cut: Cut) -> tuple[str, str]:
        """Indices within this part's share, 0 for those of other parts; and a mask of its own."""
        write = self._write
        ((start, stop),) = cut.region(write.part, write.parts).ranges
        zero = write.constant(0, "int64")
        # ONNX Runtime removes a subtraction of 0, which would occur in the first part's graph only. All graphs must
        # stay alike.
        moved = write("Sub", write("Add", places, write.constant(1, "int64")), write.constant(start + 1, "int64"))
        in_share = write(
            "And", write("GreaterOrEqual", moved, zero), write("Less", moved, write.constant(stop - start, "int64"))
        )
        return write("Where", in_share, moved, zero), in_share

    def look_up(self, node: onnx.NodeProto, cut: Cut, facts: Facts) -> None:
        """Rows of the table: those of other parts are zeros, and the sum over the parts is the row."""
        write, (table, places), output = self._write, node.input[:2], node.output[0]
        places = write.cast(places, onnx.TensorProto.INT64)
        zero = write.constant(0, "int64")
        # Gather counts negative indices from the end (opset 11), here from that of the whole table.
        behind = write("Add", places, write.constant(cut.length, "int64"))
        places = write("Where", write("Less", places, zero), behind, places)
        safe, in_share = self._own(places, cut)
        rows = write("Gather", table, safe, axis=0)
        masked = write("Where", write("Unsqueeze", in_share, write.ints(-1)), rows, write.constant(0.0))
        write.reduce(masked, output=output)

    def _normalizer(self, scores: str, axis: int) -> tuple[str, str]:
        """The maximum of the scores, and the sum of the exponentials of the scores minus it; both over all parts."""
        write = self._write
        axes = write.ints(axis)
        # It keeps the exponentials finite and cancels, so that its gradient, which the rule of collectives leaves out,
        # is 0.
        largest = write.reduce(write("ReduceMax", scores, axes, keepdims=1), Kind.ALL_REDUCE_MAX)
        exponentials = write("Exp", write("Sub", scores, largest))
        return largest, write.reduce(write("ReduceSum", exponentials, axes, keepdims=1))

    def log_softmax(self, node: onnx.NodeProto, cut: Cut, *, copied: bool) -> None:
        """This part's log probabilities."""
        write, scores = self._write, node.input[0]
        largest, total = self._normalizer(scores, cut.axis)
        logarithm = write("Log", total)
        if copied:
            # The probabilities of every part depend on it.
            logarithm = write.reduce(logarithm, Kind.COPY)
        write("Sub", write("Sub", scores, largest), logarithm, output=node.output[0])

    def cross_entropy(self, node: onnx.NodeProto, cut: Cut) -> None:
        """log(sum of exponentials) - the label's score, summed or averaged over the labels that count."""
        write, (scores, labels), flags = self._write, node.input[:2], attributes_of(node)
        largest, total = self._normalizer(scores, 1)
        normalizer = write("Add", write("Log", total), largest)
        labels = write.cast(labels, onnx.TensorProto.INT64)
        safe, in_share = self._own(labels, cut)
        axes, zero = write.ints(1), write.constant(0.0)
        picked = write("GatherElements", scores, write("Unsqueeze", safe, axes), axis=1)
        picked = write.reduce(write("Where", write("Unsqueeze", in_share, axes), picked, zero))
        losses = write("Squeeze", write("Sub", normalizer, picked), axes)
        ignored = flags.get("ignore_index")
        counted = ""
        if ignored is not None:
            counted = write("Not", write("Equal", labels, write.constant(ignored, "int64")))
            losses = write("Where", counted, losses, zero)
        reduction = flags.get("reduction", b"mean").decode()
        if reduction == "none":
            write("Identity", losses, output=node.output[0])
        elif reduction == "sum":
            write("ReduceSum", losses, output=node.output[0], keepdims=0)
            ((start, _),) = cut.region(write.part, write.parts).ranges
            flags = {} if ignored is None else {"ignore": ignored}
            note(
                write.made[-1], scores, labels,
                start=start, total=cut.length, channel=write.channel, parts=write.parts, **flags,
            )  # fmt: skip
        elif counted:
            summed = write("ReduceSum", losses, keepdims=0)
            write("Div", summed, write("ReduceSum", write.cast(counted), keepdims=0), output=node.output[0])
        else:
            write("ReduceMean", losses, output=node.output[0], keepdims=0)
