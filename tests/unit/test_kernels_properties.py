"""Thousands of random cases of each operator against numpy in double precision, with every set of instructions.

Sizes are drawn around the kernels' own: vectors, tiles, blocks and what one task takes; 0 and 1 among them. A case that
fails is printed in full: its number is the seed that reproduces it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels import LEVELS, Array, compute, library_of, needs_kernels, view
from operators_on_gpu import rotated

from ortflow.workflow.onnx_runtime import native

pytestmark = [needs_kernels, pytest.mark.rotates("properties of kernels")]
CASES = 400
SMALL = (0, 1, 1, 2, 3, 4, 5)
MIDDLE = (1, 2, 3, 6, 7, 8, 9, 13, 14, 15, 16, 17, 28, 31, 32, 33, 48, 63, 64, 65)
LARGE = (55, 56, 57, 63, 112, 127, 128, 129, 200, 255, 256, 257, 383, 384, 385, 500)
Random = np.random.Generator
erf = np.vectorize(math.erf, otypes="d")


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest) -> Path:
    return library_of(request.param)


def cases(count: int = CASES) -> Iterator[tuple[int, Random]]:
    for seed in range(count):
        yield seed, np.random.default_rng(seed)


def size(random: Random, *, least: int = 0) -> int:
    """Mostly a few vectors, rarely more than a block."""
    chosen = int(random.choice([0, 1, 1, 1, 1, 2]))
    return max(least, int(random.choice((SMALL, MIDDLE, LARGE)[chosen])))


def draw(random: Random, *dims: int) -> Array:
    """Normal values whose scale differs between tensors."""
    return np.asarray(random.standard_normal(dims) * random.choice([1e-3, 1.0, 1.0, 30.0]), np.float32)


def near(found: Array, expected: Array, scale: Array | float, ulps: float, expected_text: object) -> None:
    """|found - expected| <= ulps * 2^-24 * scale, element by element."""
    assert found.shape == expected.shape, expected_text
    bound = ulps * 2.0**-24 * np.broadcast_to(np.abs(scale), expected.shape) + 1e-37
    worst = np.abs(found - expected) - bound
    assert not worst.size or worst.max() <= 0, (expected_text, float(worst.max()))


def shares(random: Random, rank: int) -> tuple[list[int], list[int]]:
    """Batch axes of two factors that numpy broadcasts against each other."""
    whole = [int(random.choice([0, 1, 2, 3, 5, 7], p=[0.04, 0.2, 0.3, 0.26, 0.1, 0.1])) for _ in range(rank)]
    if rank == 1 and random.random() < 0.1:
        whole = [int(random.choice([100, 513]))]
    a, b = ([1 if random.random() < 0.2 else n for n in whole] for _ in range(2))
    return a[int(random.choice([0, 0, 0, rank])) :], b[int(random.choice([0, 0, 0, rank])) :]


def test_products(library: Path) -> None:
    refused = 0
    for seed, random in cases(1000):
        batch_a, batch_b = shares(random, int(random.integers(0, 4)))
        small = math.prod(batch_a) * math.prod(batch_b) > 20
        m, n, k = (int(random.choice((0, *MIDDLE))) if small else size(random) for _ in range(3))
        a, b = draw(random, *batch_a, m, k), draw(random, *batch_b, k, n)
        alpha = float(random.choice([1.0, 1.0, 0.125, -3.0, 0.0]))
        # Sessions with several threads are slow to create, and the attributes require one for nearly every case.
        flags: dict[str, Any] = {"alpha": alpha, "threads": int(random.choice([1, 2], p=[0.95, 0.05]))}
        lie = []
        for name, array in (("a", a), ("b", b)):
            flags[f"turn_{name}"] = int(random.integers(0, 2))
            seen = array.swapaxes(-1, -2) if flags[f"turn_{name}"] else array
            order = random.permutation(array.ndim)
            flags[f"view_{name}"] = view(order) if random.random() < 0.5 else 0
            lie.append(np.ascontiguousarray(seen.transpose(np.argsort(order)) if flags[f"view_{name}"] else seen))
        exact = alpha * (a.astype("d") @ b.astype("d"))
        scale = abs(alpha) * (np.abs(a).astype("d") @ np.abs(b).astype("d"))
        order = random.permutation(exact.ndim)
        flags["view_y"] = view(order) if random.random() < 0.5 else 0
        biased = bool(random.random() < 0.3)
        if biased:
            lie.append(draw(random, n))
            exact, scale = exact + lie[-1], scale + np.abs(lie[-1])
        case = (seed, a.shape, b.shape, flags, biased)
        last = exact.ndim - 1
        if flags["view_y"]:
            exact, scale = exact.transpose(order), scale.transpose(order)
            if order[-1] < last - 1 or (biased and order[-1] != last):
                refused += 1
                if exact.size and min(exact.shape) > 1:
                    with pytest.raises(native.InvalidArgument):
                        compute("Product", *lie, library=library, **flags)
                continue
        (y,) = compute("Product", *lie, library=library, **flags)
        near(y, exact, scale, 4 + 2 * math.sqrt(k), case)
    assert 100 < refused < 500


def spread(random: Random, dims: list[int]) -> list[int]:
    """A shape that broadcasts to the dims, or omits the first ones."""
    made = [1 if random.random() < 0.3 else n for n in dims]
    return made[int(random.choice([0, 0, len(dims) - 1])) :]


def softmax(scores: Array) -> Array:
    grown = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(grown / grown.sum(-1, keepdims=True))


def shape(random: Random, axes: int, *, width: int | None = None) -> list[int]:
    """Rows of a width."""
    rows = [int(random.choice([0, 1, 2, 3, 5, 9, 30])) for _ in range(axes - 1)]
    return [*rows, size(random, least=1) if width is None else width]


def test_rotary_positions_and_their_gradient(library: Path) -> None:
    for seed, random in cases(150):
        tokens_first = bool(random.random() < 0.5)
        dims = shape(random, 4 if tokens_first else int(random.integers(1, 6)), width=2 * size(random, least=1))
        table = [*spread(random, dims)[:-1], dims[-1]]
        cosine, sine = draw(random, *table), draw(random, *table)
        flags = {"tokens_first": int(tokens_first)}
        threads = int(random.integers(1, 3))
        for operator, backward in (("Rotary", False), ("RotaryGrad", True)):
            x = draw(random, *dims)
            exact = rotated(x, cosine, sine, backward=backward)
            terms = [rotated(x, *pair, backward=backward) for pair in ((cosine, 0 * sine), (0 * cosine, sine))]
            scale = np.abs(terms[0]) + np.abs(terms[1])
            given = np.ascontiguousarray(x.swapaxes(1, 2)) if tokens_first and not backward else x
            if tokens_first and backward:
                exact, scale = exact.swapaxes(1, 2), scale.swapaxes(1, 2)
            (y,) = compute(operator, given, cosine, sine, library=library, threads=threads, **flags)
            near(y, exact, scale, 4, (seed, operator, x.shape, table, tokens_first))


def test_softmax_and_its_gradient(library: Path) -> None:
    for seed, random in cases():
        dims = shape(random, int(random.integers(1, 5)))
        scale, threads = float(random.choice([1.0, 0.125, -2.0])), int(random.integers(1, 3))
        x = draw(random, *spread(random, dims))
        masks = [draw(random, *spread(random, dims))] if random.random() < 0.6 else []
        scores = scale * x.astype("d") + (masks[0] if masks else 0)
        (y,) = compute("Softmax", x, *masks, library=library, threads=threads, scale=scale)
        case = (seed, x.shape, [mask.shape for mask in masks], scale)
        expected = softmax(scores) if scores.size else scores
        # The rounding error of a score is proportional to it, and e^x propagates it.
        off = 10 + 4 * np.abs(scores).max(initial=0)
        near(y, expected, 1.0 if scores.shape[-1] == 1 else np.maximum(expected, 1e-30), off + 20, case)
        dy = draw(random, *scores.shape)
        (dx,) = compute("SoftmaxGrad", dy, y, library=library, threads=threads, scale=scale)
        exact = y.astype("d")
        sums = (dy * exact).sum(-1, keepdims=True)
        along = scale * exact * (np.abs(dy) + (np.abs(dy) * exact).sum(-1, keepdims=True))
        near(dx, scale * exact * (dy - sums), along, 8 + 2 * math.sqrt(scores.shape[-1]), case)


def test_normalisations_and_their_gradients(library: Path) -> None:
    for seed, random in cases():
        dims = shape(random, int(random.integers(1, 5)))
        width, epsilon = dims[-1], float(random.choice([1e-5, 1e-12, 0.1]))
        threads, biased = int(random.integers(1, 3)), bool(random.integers(0, 2))
        x, dy, scale, bias = draw(random, *dims), draw(random, *dims), draw(random, width), draw(random, width)
        x += np.float32(random.choice([0.0, 0.0, 1.0]))
        inputs = [x, scale, *([bias] if biased else [])]
        flags = {"library": library, "threads": threads, "outputs": 3}
        y, mean, inverse = compute("LayerNormalization", *inputs, **flags, epsilon=epsilon)
        exact, case = x.astype("d"), (seed, dims, epsilon, biased)
        average = exact.mean(-1, keepdims=True)
        near(mean, average, np.abs(exact).mean(-1, keepdims=True), 4 + math.sqrt(width), case)
        # The tolerance follows the rounded mean, whose error grows with |mean| / deviation.
        average = mean.astype("d")
        share = 1 / np.sqrt(np.square(exact - average).mean(-1, keepdims=True) + epsilon)
        near(inverse, share, share, 8 + math.sqrt(width), case)
        share = inverse.astype("d")
        n = (exact - average) * share
        near(y, n * scale + (bias if biased else 0), np.abs(n * scale) + (np.abs(bias) if biased else 0), 8, case)
        dx, dscale, dbias = compute("LayerNormalizationGrad", dy, x, scale, mean, inverse, **flags)
        g, ulps = dy.astype("d") * scale, 8 + 2 * math.sqrt(width)
        across, along = g.mean(-1, keepdims=True), (g * n).mean(-1, keepdims=True)
        sizes = np.abs(g) + np.abs(g).mean(-1, keepdims=True) + np.abs(n) * np.abs(g * n).mean(-1, keepdims=True)
        near(dx, (g - across - n * along) * share, sizes * share, ulps, case)
        rows = 8 + 2 * math.sqrt(math.prod(dims[:-1]))
        for found, terms in ((dscale, dy.astype("d") * n), (dbias, dy.astype("d"))):
            terms = terms.reshape(-1, width)
            near(found, terms.sum(0), np.abs(terms).sum(0), rows, case)


def test_root_mean_squares_and_their_gradients(library: Path) -> None:
    for seed, random in cases():
        dims = shape(random, int(random.integers(1, 5)))
        width, epsilon = dims[-1], float(random.choice([1e-5, 1e-12, 0.1]))
        x, dy, scale = draw(random, *dims), draw(random, *dims), draw(random, width)
        x += np.float32(random.choice([0.0, 0.0, 1.0]))
        flags: dict[str, Any] = {"library": library, "threads": int(random.integers(1, 3)), "outputs": 2}
        y, inverse = compute("RMSNormalization", x, scale, **flags, epsilon=epsilon)
        exact, case = x.astype("d"), (seed, dims, epsilon)
        share = 1 / np.sqrt(np.square(exact).mean(-1, keepdims=True) + epsilon)
        near(inverse, share, share, 8 + math.sqrt(width), case)
        n = exact * share
        near(y, n * scale, np.abs(n * scale), 12 + math.sqrt(width), case)
        n, share = exact * inverse.astype("d"), inverse.astype("d")
        dx, dscale = compute("RMSNormalizationGrad", dy, x, scale, inverse, **flags)
        g, ulps = dy.astype("d") * scale, 8 + 2 * math.sqrt(width)
        sizes = np.abs(g) + np.abs(n) * np.abs(g * n).mean(-1, keepdims=True)
        near(dx, (g - n * (g * n).mean(-1, keepdims=True)) * share, sizes * share, ulps, case)
        terms = (dy.astype("d") * n).reshape(-1, width)
        near(dscale, terms.sum(0), np.abs(terms).sum(0), 8 + 2 * math.sqrt(math.prod(dims[:-1])), case)


def test_normalised_groups_and_their_gradients(library: Path) -> None:
    for seed, random in cases():
        images, groups, each = (int(random.choice(sizes)) for sizes in ((0, 1, 2, 3), (1, 1, 2, 5), (1, 1, 2, 3, 8)))
        pixels = [int(random.choice((1, 2, 3, 7, 8, 16, 33, 65))) for _ in range(int(random.integers(0, 4)))]
        if math.prod(pixels) > 2000 or random.random() < 0.02:
            pixels = [4096 + size(random)]
        channels, epsilon = groups * each, float(random.choice([1e-5, 1e-12, 0.1]))
        dims, case = [images, channels, *pixels], (seed, images, channels, groups, pixels, epsilon)
        x, dy, scale, bias = draw(random, *dims), draw(random, *dims), draw(random, channels), draw(random, channels)
        x += np.float32(random.choice([0.0, 0.0, 1.0]))
        flags: dict[str, Any] = {"library": library, "outputs": 3, "num_groups": groups}
        y, mean, inverse = compute(
            "GroupNormalization", x, scale, bias, **flags, epsilon=epsilon, threads=int(random.integers(1, 3))
        )
        exact, gradient = (array.astype("d").reshape(images, groups, each, math.prod(pixels)) for array in (x, dy))
        count = each * math.prod(pixels)
        axes, ulps = (2, 3), 8 + 2 * math.sqrt(min(count, 4096))
        near(mean, exact.mean(axes)[..., None], np.abs(exact).mean(axes)[..., None], ulps, case)
        average = mean.astype("d")[..., None]
        share = 1 / np.sqrt(np.square(exact - average).mean(axes, keepdims=True) + epsilon)
        near(inverse, share[..., 0], share[..., 0], ulps, case)
        share = inverse.astype("d")[..., None]
        n, steep, moved = (exact - average) * share, *(v.astype("d").reshape(1, groups, each, 1) for v in (scale, bias))
        near(y, (n * steep + moved).reshape(dims), (np.abs(n * steep) + np.abs(moved)).reshape(dims), 12, case)
        one, two = (
            compute("GroupNormalizationGrad", dy, x, scale, mean, inverse, **flags, threads=threads)
            for threads in (1, 2)
        )
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True)), case
        g = gradient * steep
        across, along = g.mean(axes, keepdims=True), (g * n).mean(axes, keepdims=True)
        sizes = np.abs(g) + np.abs(g).mean(axes, keepdims=True) + np.abs(n) * np.abs(g * n).mean(axes, keepdims=True)
        near(one[0], ((g - across - n * along) * share).reshape(dims), (sizes * share).reshape(dims), ulps, case)
        for found, terms in ((one[1], gradient * n), (one[2], gradient)):
            near(found, terms.sum((0, 3)).reshape(-1), np.abs(terms).sum((0, 3)).reshape(-1), ulps, case)


def test_sums_over_rows(library: Path) -> None:
    for seed, random in cases():
        dims = shape(random, int(random.integers(1, 5)), width=size(random))
        if random.random() < 0.05:
            dims[:-1] = [int(random.integers(2000, 5000))]
        x = draw(random, *dims)
        one, two = (compute("ColumnSums", x, library=library, threads=threads)[0] for threads in (1, 2))
        terms = x.astype("d").reshape(math.prod(dims[:-1]), dims[-1])
        near(one, terms.sum(0), np.abs(terms).sum(0), 4 + 2 * math.sqrt(terms.shape[0]), (seed, dims))
        assert np.array_equal(one, two), (seed, dims)


def test_gelu_and_its_gradient(library: Path) -> None:
    slope = math.sqrt(2 / math.pi)
    for seed, random in cases():
        dims = [size(random) for _ in range(int(random.integers(0, 3)))]
        x, dy = draw(random, *dims), draw(random, *dims)
        exact, case = x.astype("d"), (seed, dims)
        normal = 0.5 * (1 + erf(exact / math.sqrt(2))) if x.size else exact
        bell = np.exp(-exact * exact / 2) / math.sqrt(2 * math.pi)
        inner = np.clip(2 * slope * (exact + 0.044715 * exact**3), -700, 700)
        logistic = 1 / (1 + np.exp(-inner))
        rise = logistic * (1 - logistic) * 2 * slope * (1 + 3 * 0.044715 * exact**2)
        for approximate, below, slant in ((0, normal, bell), (1, logistic, rise)):
            (y,) = compute("Gelu", x, library=library, approximate=approximate)
            near(y, exact * below, np.minimum(np.abs(exact), 5), 12, case)
            (dx,) = compute("GeluGrad", dy, x, library=library, approximate=approximate)
            near(dx, dy * (below + exact * slant), np.abs(dy), 40, case)


def test_cross_entropy_and_its_gradient(library: Path) -> None:
    for seed, random in cases():
        rows, classes = int(random.choice([0, 1, 2, 7, 64, 300])), size(random, least=1)
        scores, dloss = draw(random, rows, classes), np.float32(random.choice([1.0, 0.01, -2.0]))
        labels, ignored = random.integers(0, classes, rows), int(random.choice([-100, 0, -(2**63)]))
        labels[random.random(rows) < 0.2] = ignored if ignored > -(2**63) else 0
        threads, case = int(random.integers(1, 3)), (seed, rows, classes, ignored)
        flags = {"library": library, "threads": threads, "ignore": ignored}
        loss, sums = compute("CrossEntropy", labels, scores, outputs=2, **flags)
        made = scores - sums[:, None]
        exact = scores.astype("d")
        exact = exact - exact.max(-1, keepdims=True)
        exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
        largest = np.abs(scores).max(-1, keepdims=True) + np.abs(exact) + 1
        near(made, exact, largest, 16, case)
        counted = np.flatnonzero(labels != ignored)
        terms = -made.astype("d")[counted, labels[counted]]
        near(loss, np.asarray(terms.sum()), np.abs(terms).sum(), 2, case)
        expected = np.zeros((rows, classes))
        expected[counted] = dloss * np.exp(made.astype("d")[counted])
        expected[counted, labels[counted]] -= dloss
        (dx,) = compute("CrossEntropyGrad", labels, np.asarray(dloss), scores, sums, **flags)
        near(dx, expected, np.abs(dloss), 8, case)
        assert not dx[labels == ignored].any(), case


def test_gradients_of_tables(library: Path) -> None:
    for seed, random in cases():
        height, width = size(random, least=1), size(random)
        dims = [int(random.choice([0, 1, 3, 20])) for _ in range(int(random.integers(0, 4)))]
        indices, gradient = random.integers(-height, height, dims), draw(random, *dims, width)
        expected, sizes = np.zeros((height, width)), np.zeros((height, width))
        np.add.at(expected, indices, gradient)
        np.add.at(sizes, indices, np.abs(gradient))
        one, two = (
            compute("TableGrad", np.array([height, width]), indices, gradient, library=library, threads=threads)[0]
            for threads in (1, 2)
        )
        near(one, expected, sizes, 2 + 2 * math.sqrt(max(indices.size, 1)), (seed, height, width, dims))
        assert np.array_equal(one, two), (seed, height, width, dims)


def test_steps_of_adam(library: Path) -> None:
    for seed, random in cases():
        count = int(random.choice([0, 1, size(random), 16384 + size(random)]))
        w, g, m = (draw(random, count) for _ in range(3))
        v = np.square(draw(random, count))
        betas = float(random.choice([0.0, 0.9, 0.99])), float(random.choice([0.0, 0.999, 0.95]))
        epsilon, decay = float(random.choice([1e-8, 1e-3])), float(random.choice([0.0, 0.1]))
        t, rate = int(random.choice([1, 2, 1000, 10**7])), float(random.choice([1e-4, 0.1, 0.0]))
        flags = {"beta_1": betas[0], "beta_2": betas[1], "epsilon": epsilon, "decay": decay}
        inputs = (np.array([t]), np.array([rate], np.float32), w, g, m, v)
        found = compute("Adam", *inputs, outputs=3, library=library, threads=int(random.integers(1, 3)), **flags)
        one, two, floor, shrink, rate = (float(np.float32(f)) for f in (*betas, epsilon, decay, rate))
        ms, vs = one * m.astype("d"), two * v.astype("d")
        new_m, new_v = ms + (1 - one) * g, vs + (1 - two) * g.astype("d") ** 2
        change = rate * (new_m / (1 - one**t)) / (np.sqrt(new_v / (1 - two**t)) + floor)
        size_of = np.abs(ms) + (1 - one) * np.abs(g)
        case = (seed, count, flags, t, rate)
        near(found[0], new_m, size_of, 4, case)
        near(found[1], new_v, new_v, 8, case)
        moved = np.abs(w) + rate * (size_of / (1 - one**t)) / (np.sqrt(new_v / (1 - two**t)) + floor)
        near(found[2], w * (1 - rate * shrink) - change, moved, 16, case)


def test_steps_of_lamb(library: Path) -> None:
    for seed, random in cases():
        count = int(random.choice([0, 1, size(random), 16384 + size(random), 40000]))
        w, g, m = (draw(random, count) for _ in range(3))
        w, g, m = (array * np.float32(random.random() < 0.95) for array in (w, g, m))
        v = np.square(draw(random, count)) * np.float32(random.random() < 0.95)
        betas = float(random.choice([0.0, 0.9, 0.99])), float(random.choice([0.0, 0.999, 0.95]))
        epsilon, decay = float(random.choice([1e-8, 1e-3])), float(random.choice([0.0, 0.1]))
        t, rate = int(random.choice([1, 2, 1000, 10**7])), float(random.choice([1e-4, 0.1, 0.0]))
        flags = {"beta_1": betas[0], "beta_2": betas[1], "epsilon": epsilon, "decay": decay}
        inputs = (np.array([t]), np.array([rate], np.float32), w, g, m, v)
        found, same = (
            compute("Lamb", *inputs, outputs=3, library=library, threads=threads, **flags) for threads in (1, 2)
        )
        one, two, floor, shrink, rate = (float(np.float32(f)) for f in (*betas, epsilon, decay, rate))
        ms, vs = one * m.astype("d"), two * v.astype("d")
        new_m, new_v = ms + (1 - one) * g, vs + (1 - two) * g.astype("d") ** 2
        divisor = np.sqrt(new_v / (1 - two**t)) + floor
        u = new_m / (1 - one**t) / divisor + shrink * w
        size_of = np.abs(ms) + (1 - one) * np.abs(g)
        sizes = size_of / (1 - one**t) / divisor + shrink * np.abs(w)
        norms = np.linalg.norm(w.astype("d")), np.linalg.norm(u)
        ratio = norms[0] / norms[1] if min(norms) > 0 else 1.0
        case = (seed, count, flags, t, rate)
        near(found[0], new_m, size_of, 4, case)
        near(found[1], new_v, new_v, 8, case)
        # Where m and decay cancel, the error of u's norm is as large as its terms.
        lost = np.linalg.norm(sizes) / norms[1] if norms[1] > 0 else 1.0
        near(found[2], w - rate * ratio * u, np.abs(w) + rate * ratio * (sizes + lost * np.abs(u)), 24, case)
        assert all(np.array_equal(a, b) for a, b in zip(found, same, strict=True)), case


def test_steps_of_descent(library: Path) -> None:
    for seed, random in cases():
        count = int(random.choice([0, 1, size(random), 16384 + size(random)]))
        w, g, b = (draw(random, count) for _ in range(3))
        rate, decay, momentum = (float(random.choice(c)) for c in ((1e-4, 0.1, 0.0), (0.0, 0.1), (0.5, 0.9)))
        flags: dict[str, Any] = {"library": library, "threads": int(random.integers(1, 3)), "decay": decay}
        given, case = np.array([rate], np.float32), (seed, count, flags, rate, momentum)
        rate, decay, share = (float(np.float32(f)) for f in (rate, decay, momentum))
        change, along = g + decay * w.astype("d"), np.abs(g) + decay * np.abs(w.astype("d"))
        (plain,) = compute("Sgd", given, w, g, **flags)
        near(plain, w - rate * change, np.abs(w) + rate * along, 8, case)
        summed, heavy = change + share * b, along + share * np.abs(b)
        for nesterov in (0, 1):
            found = compute("SgdMomentum", given, w, g, b, outputs=2, momentum=momentum, nesterov=nesterov, **flags)
            near(found[1], summed, heavy, 8, case)
            step, size_of = (change + share * summed, along + share * heavy) if nesterov else (summed, heavy)
            near(found[0], w - rate * step, np.abs(w) + rate * size_of, 12, case)


@pytest.mark.parametrize("operator", ["Gelu", "Softmax", "ColumnSums"])
def test_tensors_of_no_or_eight_axes(library: Path, operator: str) -> None:
    """The maximum number of axes that the kernels support; a scalar, which has no last axis."""
    x = np.random.default_rng(0).standard_normal((2, 1, 3, 1, 2, 1, 2, 5)).astype(np.float32)
    attributes: dict[str, Any] = {"Gelu": {"approximate": 0}, "Softmax": {"scale": 1.0}}.get(operator, {})
    reference: dict[str, Callable[[Array], Array]] = {
        "Gelu": lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2))),
        "Softmax": softmax,
        "ColumnSums": lambda x: np.asarray(x.reshape(-1, 5).sum(0)),
    }
    (y,) = compute(operator, x, library=library, **attributes)
    near(y, reference[operator](x.astype("d")), 5.0, 12, operator)
    if operator != "Gelu":
        with pytest.raises(native.InvalidArgument, match="scalar"):
            compute(operator, np.array(1, np.float32), library=library, **attributes)


@pytest.mark.parametrize("few", [False, True], ids=["any", "few channels"])
def test_convolutions_and_their_gradients(library: Path, few: bool) -> None:
    """One to three spatial axes, groups, data outside of every window and windows without data."""
    for seed, random in cases(150):
        axes, groups = int(random.integers(1, 4)), int(random.choice([1, 4, 11] if few else [1, 1, 2, 3, 7]))
        channels, made = (int(random.choice([1, 1, 2, 4] if few else [1, 2, 5, 8, 17, 40])) for _ in range(2))
        kernel, stride, before, after = (
            random.integers(low, high, axes) for low, high in ((1, 5), (1, 4), (0, 4), (0, 4))
        )
        dilation = random.integers(1, 3, axes)
        reach = dilation * (kernel - 1) + 1
        size = np.maximum(1, reach - before - after + random.integers(0, 13, axes))
        out = (size + before + after - reach) // stride + 1
        images = int(random.choice([0, 1, 2, 3], p=[0.05, 0.35, 0.3, 0.3]))
        x = draw(random, images, groups * channels, *size)
        weight = draw(random, groups * made, channels, *kernel)
        dy = draw(random, images, groups * made, *out)
        padding = [(0, 0), (0, 0), *zip(before, after, strict=True)]
        wide = np.pad(x.astype("d"), padding)
        exact = [np.zeros_like(wide), np.zeros(weight.shape), np.zeros(dy.shape)]
        scale = [np.zeros_like(wide), np.zeros(weight.shape), np.zeros(dy.shape)]
        for offset in np.ndindex(*kernel):
            first = np.array(offset) * dilation
            places = tuple(slice(f, f + s * (n - 1) + 1, s) for f, s, n in zip(first, stride, out, strict=True))
            for g in range(groups):
                ins, outs = slice(g * channels, (g + 1) * channels), slice(g * made, (g + 1) * made)
                at, factor, slope = (
                    (slice(None), ins, *places),
                    weight[(outs, slice(None), *offset)].astype("d"),
                    dy[:, outs],
                )
                for results, f, s, d in (
                    (exact, factor, slope.astype("d"), wide[at]),
                    (scale, np.abs(factor), np.abs(slope).astype("d"), np.abs(wide[at])),
                ):
                    results[0][at] += np.einsum("nm...,mc->nc...", s, f)
                    results[2][:, outs] += np.einsum("nc...,mc->nm...", d, f)
                    results[1][(outs, slice(None), *offset)] = np.einsum(
                        "nmp,ncp->mc", *(v.reshape(*v.shape[:2], out.prod()) for v in (s, d))
                    )
        inner = (slice(None), slice(None), *(slice(b, b + n) for b, n in zip(before, size, strict=True)))
        geometry = np.array([groups, *kernel, *stride, *before, *dilation], np.int64)
        threads = int(random.choice([1, 2], p=[0.9, 0.1]))
        case = (seed, x.shape, weight.shape, dy.shape, geometry.tolist())
        shape = np.array(x.shape, np.int64)
        (dx,) = compute("ConvDataGrad", geometry, shape, dy, weight, library=library, threads=threads)
        near(dx, exact[0][inner], scale[0][inner], 4 + 2 * math.sqrt(made * kernel.prod()), case)
        bias = draw(random, groups * channels)
        added = bias.reshape(-1, *(1 for _ in range(axes)))
        (dx,) = compute("ConvDataGrad", geometry, shape, dy, weight, bias, library=library, threads=threads)
        bound = scale[0][inner] + np.abs(added)
        near(dx, exact[0][inner] + added, bound, 5 + 2 * math.sqrt(made * kernel.prod()), case)
        (dw,) = compute("ConvWeightGrad", geometry, dy, x, library=library, threads=threads)
        near(dw, exact[1], scale[1], 4 + 2 * math.sqrt(images * out.prod()), case)
        bias = draw(random, groups * made)
        added = bias.reshape(-1, *(1 for _ in range(axes)))
        given = geometry, after.astype(np.int64), x, weight
        ulps = 5 + 2 * math.sqrt(channels * kernel.prod())
        (y,) = compute("Conv", *given, bias, library=library, threads=threads)
        near(y, exact[2] + added, scale[2] + np.abs(added), ulps, case)
        (y,) = compute("Conv", *given, library=library)
        near(y, exact[2], scale[2], ulps, case)


LARGE_CONVOLUTIONS = {
    "several chunks of images": ((9, 40, 66, 50), (24, 40, 3, 3), 1, 1),
    "an image of several chunks": ((1, 5, 300, 400), (6, 5, 2, 3), 2, 0),
    "many channels, few places": ((5, 260, 2, 2), (300, 260, 3, 3), 1, 1),
    "many channels, strides": ((3, 130, 9, 8), (131, 130, 4, 4), 2, 1),
    "a long kernel": ((2, 4, 700), (5, 4, 300), 1, 150),
    "single places": ((3, 120, 15, 16), (200, 120, 1, 1), 1, 0),
    "one place": ((3, 40, 4, 4), (50, 40, 4, 4), 1, 0),
    "large images for a large weight": ((9, 150, 8, 8), (300, 150, 4, 4), 2, 1),
    "groups": ((3, 4 * 20, 12, 16), (4 * 17, 20, 3, 3), 1, 1),
}


@pytest.mark.parametrize("name", LARGE_CONVOLUTIONS)
def test_convolutions_larger_than_every_block(library: Path, name: str) -> None:
    """In double precision, the data's gradient in random directions; threads change no bit."""
    dims, weights, stride, pad = LARGE_CONVOLUTIONS[name]
    random, axes, groups = np.random.default_rng(1), len(dims) - 2, dims[1] // weights[1]
    x, w = (random.standard_normal(shape).astype(np.float32) for shape in (dims, weights))
    geometry = np.array([groups, *weights[2:], *[stride] * axes, *[pad] * axes, *[1] * axes], np.int64)
    wide = np.pad(x.astype("d"), [(0, 0), (0, 0), *[(pad, pad)] * axes])
    seen = np.lib.stride_tricks.sliding_window_view(wide, weights[2:], tuple(range(2, 2 + axes)))
    seen = seen[(slice(None), slice(None), *[slice(None, None, stride)] * axes)]
    out = seen.shape[2 : 2 + axes]
    dy = random.standard_normal((dims[0], weights[0], *out)).astype(np.float32)
    # [image, group, channel, place, place of the kernel]
    seen = seen.reshape(dims[0], groups, weights[1], math.prod(out), math.prod(weights[2:]))
    kernels = w.astype("d").reshape(groups, -1, *seen.shape[2::2])
    slopes = dy.astype("d").reshape(dims[0], groups, kernels.shape[1], -1)
    y = np.einsum("ngcpk,gmck->ngmp", seen, kernels, optimize=True).reshape(dy.shape)
    dw = np.einsum("ngcpk,ngmp->gmck", seen, slopes, optimize=True).reshape(weights)
    behind, shape = np.array([pad] * axes, np.int64), np.array(dims, np.int64)
    calls = {
        "Conv": (geometry, behind, x, w),
        "ConvWeightGrad": (geometry, dy, x),
        "ConvDataGrad": (geometry, shape, dy, w),
    }
    found = {}
    for operator, given in calls.items():
        one, two = (compute(operator, *given, library=library, threads=threads)[0] for threads in (1, 3))
        assert np.array_equal(one, two), operator
        found[operator] = one.astype("d")
    assert np.abs(found["Conv"] - y).max() <= 4e-6 * np.abs(y).max()
    assert np.abs(found["ConvWeightGrad"] - dw).max() <= 4e-6 * np.abs(dw).max()
    dx = found["ConvDataGrad"]
    for _ in range(3):
        probe = random.standard_normal(dims)
        padded = np.pad(probe, [(0, 0), (0, 0), *[(pad, pad)] * axes])
        met = np.lib.stride_tricks.sliding_window_view(padded, weights[2:], tuple(range(2, 2 + axes)))
        met = met[(slice(None), slice(None), *[slice(None, None, stride)] * axes)].reshape(seen.shape)
        expected = np.einsum("ngcpk,gmck,ngmp->", met, kernels, slopes, optimize=True)
        assert abs((dx * probe).sum() - expected) <= 4e-6 * np.sqrt((dx * dx).sum()) * 4


def test_batch_normalization_and_its_gradient(library: Path) -> None:
    """On images whose mean may be far from 0."""
    for seed, random in cases(200):
        images, channels = int(random.integers(1, 5)), int(random.choice([1, 2, 5, 17]))
        dims = [size(random, least=1) % 130 + 1 for _ in range(int(random.integers(1, 3)))]
        x = draw(random, images, channels, *dims) + np.float32(random.choice([0, 0, 10]))
        scale, bias, dy = draw(random, channels), draw(random, channels), draw(random, *x.shape)
        epsilon = float(random.choice([1e-5, 0.1]))
        y, mean, variance = compute("BatchNormalization", x, scale, bias, outputs=3, library=library, epsilon=epsilon)
        axes = (0, *range(2, x.ndim))
        wide, slope = x.astype("d"), dy.astype("d")
        exact, spread = wide.mean(axes), wide.var(axes)
        count = x.size / channels
        # The sums are of distances from a channel's first value, which may be an outlier.
        first = wide.reshape(*wide.shape[:2], -1)[0, :, 0]
        near(mean, exact, np.abs(wide).mean(axes) + np.abs(first), 4, seed)
        near(variance, spread, spread + 1e-6 * exact**2, 16, seed)

        def of_channels(values: Array, rank: int = x.ndim) -> Array:
            return values.reshape(-1, *(1 for _ in range(rank - 2)))

        inverse = 1 / np.sqrt(spread + epsilon)
        normal = (wide - of_channels(exact)) * of_channels(inverse)
        # The mean is rounded, and its error affects every value.
        rounding = of_channels(np.abs(wide).mean(axes) * inverse * np.abs(scale))
        near(
            y,
            normal * of_channels(scale) + of_channels(bias),
            np.abs(normal * of_channels(scale)) + np.abs(of_channels(bias)) + rounding,
            24,
            seed,
        )
        given = exact.astype(np.float32), inverse.astype(np.float32)
        dx, dscale, dbias = compute("BatchNormalizationGrad", dy, x, scale, *given, outputs=3, library=library)
        normal = (wide - of_channels(given[0].astype("d"))) * of_channels(given[1].astype("d"))
        along, across = (slope * normal).sum(axes), slope.sum(axes)
        steep = of_channels(np.abs(scale) * inverse)
        found = (slope - of_channels(across) / count - normal * of_channels(along) / count) * of_channels(
            scale * inverse
        )
        size_of = (
            np.abs(slope)
            + of_channels(np.abs(slope).mean(axes))
            + np.abs(normal) * of_channels(np.abs(slope * normal).mean(axes))
        )
        near(dscale, along, np.abs(slope * normal).sum(axes), 16, seed)
        near(dbias, across, np.abs(slope).sum(axes), 16, seed)
        near(dx, found, size_of * steep, 24, seed)


def test_the_gradient_of_pooling_by_the_maximum(library: Path) -> None:
    """Exactly, where windows do not overlap; ties go to the first, and padding is never a maximum."""
    for seed, random in cases(300):
        axes = int(random.integers(1, 4))
        kernel, stride, before, dilation = (
            random.integers(low, high, axes) for low, high in ((1, 5), (1, 4), (0, 4), (1, 3))
        )
        before = np.minimum(before, kernel - 1)
        reach = dilation * (kernel - 1) + 1
        size = reach + random.integers(0, 23, axes)
        # As with ceil_mode, the last windows may extend beyond the data.
        out = (size + before - 1) // stride + 1 - random.integers(0, 2, axes)
        out = np.maximum(1, out)
        images, channels = int(random.integers(0, 3)), int(random.choice([1, 3, 17]))
        x = draw(random, images, channels, *size)
        if random.random() < 0.5:
            x = np.maximum(np.round(x), 0)
        dy = draw(random, images, channels, *out)
        wide = np.full((images, channels, *((out - 1) * stride + reach + size)), -np.inf)
        inner = (slice(None), slice(None), *(slice(b, b + n) for b, n in zip(before, size, strict=True)))
        wide[inner] = x
        taken = np.stack(
            [
                wide[(..., *(slice(f, f + s * (n - 1) + 1, s) for f, s, n in zip(at, stride, out, strict=True)))]
                for at in (np.array(offset) * dilation for offset in np.ndindex(*kernel))
            ]
        )
        first, exact = taken.argmax(0), np.zeros(wide.shape)
        for place, offset in enumerate(np.ndindex(*kernel)):
            begins = np.array(offset) * dilation
            at = (..., *(slice(f, f + s * (n - 1) + 1, s) for f, s, n in zip(begins, stride, out, strict=True)))
            exact[at] += np.where((first == place) & (taken[place] > -np.inf), dy, 0)
        geometry = np.array([1, *kernel, *stride, *before, *dilation], np.int64)
        (dx,) = compute("MaxPoolGrad", geometry, dy, x, library=library)
        near(dx, exact[inner], np.abs(dy).max(initial=0), 2.0 * kernel.prod(), (seed, x.shape, geometry.tolist()))


def test_scaled_gradients_and_their_norm(library: Path) -> None:
    """For any count, with the same bits for any number of threads; larger norms are clipped."""
    for seed, random in cases(200):
        count = int(random.choice([0, 1, 63, 64, 1000, 16383, 16384, 16385, 100_003]))
        gradients, factor = draw(random, count), np.float32(random.choice([1.0, 0.01, 3.0]))
        exact = gradients.astype("d") * factor
        norm = float(np.linalg.norm(exact))
        most = np.float32(random.choice([np.inf, 2 * norm + 1, 0.3 * norm]))
        given = gradients, factor.reshape(1), most.reshape(1)
        runs = [compute("ScaleGradients", *given, outputs=2, library=library, threads=n) for n in (1, 2)]
        assert all(np.array_equal(one, two) for one, two in zip(*runs, strict=True)), seed
        scaled, found = runs[0]
        near(found, np.array([norm]), norm, 8, (seed, count))
        exact *= min(1.0, float(most) / (norm + 1e-6))
        near(scaled, exact, exact, 16, (seed, count, factor, most))
