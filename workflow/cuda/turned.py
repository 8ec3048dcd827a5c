"""The images of a training graph that is being rewritten, with channels last. Used by `images`."""

from __future__ import annotations

from onnx import TensorProto

from ortflow.workflow.cuda.windows import AXES
from ortflow.workflow.graph.ir.rewriter import Rewriter

LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
RANK = AXES + 2


class Turned:
    """Images, and the same values with channels last."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.w = rewriter
        self.of: dict[str, str] = {}
        """Image -> the same with channels last."""
        self.made: set[str] = set()
        """Images that are computed with channels last."""

    def last(self, image: str) -> str:
        """The image with channels last, made if it is not there yet."""
        if image not in self.of:
            self.of[image] = self.new(f"{image}/last", image, self.w.element(image))
            self.w("Transpose", image, output=self.of[image], perm=LAST)
        return self.of[image]

    def new(self, name: str, model: str, element: int = TensorProto.FLOAT) -> str:
        """A described value of the sizes of an image, channels last."""
        dims = self.w.dims(model)
        self.w.describe(name, element, None if dims is None else tuple(dims[axis] for axis in LAST))
        return name

    def back(self, value: str, image: str) -> None:
        """Let an image be the value, whose channels are last."""
        self.of[image] = value
        self.made.add(image)
        self.w("Transpose", value, output=image, perm=FIRST)
