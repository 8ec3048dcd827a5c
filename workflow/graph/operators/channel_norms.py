"""Normalisations with a scale and a bias per channel, and their gradients in ONNX operators.

Images are reshaped to [batch, channels, pixels], and per-channel vectors to [channels, 1], whatever their rank.
"""

from __future__ import annotations

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.collective import SYNCED, Kind, collective
from ortflow.workflow.graph.ir.replacement import Replacement
from ortflow.workflow.graph.rules.composition import composition
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.size import first_like_first, size_rule
from ortflow.workflow.graph.rules.traits import weights

_PIXELS = 2


def flat(w: Replacement, value: str) -> str:
    """Reshape an image to [batch, channels, pixels]."""
    return w("Reshape", value, w.ints(0, 0, -1))


def column(w: Replacement, value: str) -> str:
    """Reshape a per-channel vector to [channels, 1]."""
    return w("Unsqueeze", value, w.ints(1))


def by_batch_gradients(
    w: Replacement, gradient: str, x: str, scale: str, mean: str, inverse: str
) -> tuple[str, str, str]:
    """Gradients of x, scale and bias for a normalisation by batch statistics.

    With n = (x - mean) inverse and means over batch and pixels: dx = (dy - mean(dy) - n mean(dy n)) scale inverse.
    """
    rows, shape = flat(w, gradient), w("Shape", x)
    centred = w("Sub", flat(w, x), column(w, mean))
    of_bias, along = _over_channels(w, rows), _over_channels(w, w("Mul", rows, centred))
    count = w("Cast", w("Div", w("Size", x), w("Size", scale)), to=1)
    slope = w("Mul", scale, inverse)
    # This is one sum of dy, x - mean and 1, each multiplied by a small vector.
    of_centred = w("Neg", w("Div", w("Mul", along, w("Mul", inverse, inverse)), count))
    offset = w("Neg", w("Div", of_bias, count))
    rest = w("Add", w("Mul", centred, column(w, of_centred)), column(w, offset))
    of_data = w("Mul", w("Add", rows, rest), column(w, slope))
    return w("Reshape", of_data, shape), w("Mul", along, inverse), of_bias


def _over_channels(w: Replacement, value: str) -> str:
    return w("ReduceSum", value, w.ints(0, _PIXELS), keepdims=0)


@gradient_rule("BatchNormalization")
def batch_normalization(b: Backward) -> Gradients:
    if not b.gradient():
        # The statistics have no gradient.
        return
    replicas = _replicas(b)
    if replicas is not None:
        yield from _over_replicas(b, *replicas)
        return
    if not b.attribute("training_mode", 0):
        yield from _by_fixed_statistics(b)
        return
    x, scale = b.input(0), b.input(1)
    # The running statistics are momentum times those before plus (1 - momentum) times the batch's: with 0 they are the
    # batch's.
    if b.attribute("momentum", 0.9) == 0 and b.output(1) and b.output(2):
        mean, variance = b.output(1), b.output(2)
    else:
        pixels = flat(b, x)
        average = b("ReduceMean", pixels, b.ints(0, _PIXELS), keepdims=1)
        centred = b("Sub", pixels, average)
        mean = b("Reshape", average, b.ints(-1))
        variance = b("ReduceMean", b("Mul", centred, centred), b.ints(0, _PIXELS), keepdims=0)
    inputs = b.gradient(), x, scale, mean, _inverse(b, variance)
    epsilon = b.attribute("epsilon", 1e-5)
    yield from enumerate(b.several("BatchNormalizationGrad", 3, *inputs, domain=MICROSOFT, epsilon=epsilon))


def _inverse(b: Backward, variance: str) -> str:
    """The inverse standard deviation."""
    return b("Reciprocal", b("Sqrt", b("Add", variance, b.constant(b.attribute("epsilon", 1e-5)))))


def _replicas(b: Backward) -> tuple[int, int] | None:
    """Channel and number of the ranks that the statistics run over; None if they are those of this rank alone."""
    noted = next((prop.value for prop in b.node.metadata_props if prop.key == SYNCED), None)
    if noted is None:
        return None
    channel, count = map(int, noted.split())
    return channel, count


def _over_replicas(b: Backward, channel: int, replicas: int) -> Gradients:
    """As `by_batch_gradients`, with both sums over all ranks in the gradient of x.

    Those of scale and bias are this rank's: the ranks add up the gradients of parameters afterwards.
    """
    x, scale, _, mean, variance = b.node.input
    inverse, rows = _inverse(b, variance), flat(b, b.gradient())
    centred = b("Sub", flat(b, x), column(b, mean))
    of_bias, along = _over_channels(b, rows), _over_channels(b, b("Mul", rows, centred))
    if b.wants(0):
        count = b("Cast", b("Div", b("Size", x), b("Size", scale)), to=1)
        local = b("Concat", of_bias, along, b("Reshape", count, b.ints(1)), axis=0)
        # One sum for all three. A rank may have fewer samples than the others, so that the count is summed as well.
        total = collective(b, Kind.ALL_REDUCE, local, channel, replicas)
        width = b("Reshape", b("Size", scale), b.ints(1))
        sums = [b.fresh(name) for name in ("of_bias", "along", "count")]
        b.write("Split", [total, b("Concat", width, width, b.ints(1), axis=0)], sums, axis=0)
        of_centred = b("Neg", b("Div", b("Mul", sums[1], b("Mul", inverse, inverse)), sums[2]))
        offset = b("Neg", b("Div", sums[0], sums[2]))
        rest = b("Add", b("Mul", centred, column(b, of_centred)), column(b, offset))
        of_data = b("Mul", b("Add", rows, rest), column(b, b("Mul", scale, inverse)))
        yield 0, b("Reshape", of_data, b("Shape", x))
    if b.wants(1):
        yield 1, b("Mul", along, inverse)
    if b.wants(2):
        yield 2, of_bias


def _by_fixed_statistics(b: Backward) -> Gradients:
    x, scale, _, mean, variance = b.node.input
    inverse, rows = _inverse(b, variance), flat(b, b.gradient())
    if b.wants(0):
        yield 0, b("Reshape", b("Mul", rows, column(b, b("Mul", scale, inverse))), b("Shape", x))
    if b.wants(1):
        centred = b("Sub", flat(b, x), column(b, mean))
        yield 1, b("Mul", _over_channels(b, b("Mul", rows, centred)), inverse)
    if b.wants(2):
        yield 2, _over_channels(b, rows)


@gradient_rule("InstanceNormalization")
def instance_normalization(b: Backward) -> Gradients:
    # Unlike LayerNormalization, ONNX's InstanceNormalization does not output its statistics.
    x, axis = flat(b, b.input(0)), b.ints(_PIXELS)
    centred = b("Sub", x, b("ReduceMean", x, axis, keepdims=1))
    inverse = _inverse(b, b("ReduceMean", b("Mul", centred, centred), axis, keepdims=1))
    rows, normal = flat(b, b.gradient()), b("Mul", centred, inverse)
    outer = b("Mul", rows, normal)
    if b.wants(0):
        along = b("Mul", normal, b("ReduceMean", outer, axis, keepdims=1))
        rest = b("Sub", b("Sub", rows, b("ReduceMean", rows, axis, keepdims=1)), along)
        of_data = b("Mul", rest, b("Mul", inverse, column(b, b.input(1))))
        yield 0, b("Reshape", of_data, b("Shape", b.input(0)))
    if b.wants(1):
        yield 1, _over_channels(b, outer)
    if b.wants(2):
        yield 2, _over_channels(b, rows)


@gradient_rule("GroupNormalization", domain=MICROSOFT)
def group_normalization(b: Backward) -> Gradients:
    inputs = b.gradient(), b.input(0), b.input(1), b.saved_output(1), b.saved_output(2)
    groups = b.attribute("num_groups", 1)
    gradients = b.several("GroupNormalizationGrad", 3, *inputs, domain=MICROSOFT, num_groups=groups)
    yield 0, gradients[0]
    for place in (1, 2):
        if b.wants(place):
            yield place, b.reshaped(gradients[place], b.input(place))


@composition("BatchNormalizationGrad")
def batch_norm_gradients(w: Replacement) -> None:
    """BatchNormalizationGrad(gradient, data, scale, mean, inverse standard deviation)."""
    gradient, x, scale, mean, inverse = w.node.input
    w.done(*by_batch_gradients(w, gradient, x, scale, mean, inverse))


_NORMS = ("BatchNormalization", "GroupNormalization", "InstanceNormalization")
size_rule(*_NORMS)(first_like_first)
weights(_NORMS, 1, 2)
