"""The masks of dropout: Philox's published answers, the kernel of CPUs against numpy, rates and independence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels import LEVELS, compute, library_of, needs_kernels
from philox import VECTORS, Array, dropped, kept, philox, words

from ortflow.workflow.kernels.dropout import attributes
from ortflow.workflow.onnx_runtime import native

SEED = 0x1234_5678_9ABC_DEF0


def on_cpu(x: Array, seed: int, flags: dict[str, int | float], number: int = 0, **how: Any) -> Array:
    (y,) = compute("Dropout", np.array([seed], np.int64), np.array([number], np.int64), x, **how, **flags)
    return y


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_the_reference_has_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    found = philox(np.array([counter], np.uint32), key)
    assert tuple(map(int, found[0])) == expected


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (64,), (3, 5, 11), (16385,), (2, 4, 9001)])
@pytest.mark.parametrize("seed", [0, 1, SEED, 2**63 - 1])
def test_the_kernel_draws_what_numpy_draws(shape: tuple[int, ...], seed: int, level: str) -> None:
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    flags = attributes(0.3)
    y = on_cpu(x, seed, flags, 12, library=library_of(level))
    np.testing.assert_array_equal(y, dropped(x, seed, 12, int(flags["dropped"]), float(flags["scale"])))


@needs_kernels
def test_the_kernel_does_not_depend_on_the_threads() -> None:
    x, flags = np.ones(100_003, np.float32), attributes(0.5)
    np.testing.assert_array_equal(on_cpu(x, 7, flags, threads=1), on_cpu(x, 7, flags, threads=2))


@pytest.mark.parametrize("ratio", [1e-3, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept_and_its_scale(ratio: float) -> None:
    count, flags = 1 << 20, attributes(ratio)
    share = kept(SEED, 3, int(flags["dropped"]), (count,)).mean()
    deviation = (ratio * (1 - ratio) / count) ** 0.5
    assert abs(share - (1 - ratio)) < 5 * deviation
    assert abs(flags["scale"] * (1 - ratio) - 1) < 1e-12
    mean = dropped(np.ones(count, np.float32), SEED, 3, int(flags["dropped"]), float(flags["scale"])).mean()
    assert abs(mean - 1) < 5 * deviation / (1 - ratio)


def test_a_ratio_near_1_still_keeps_something() -> None:
    assert attributes(1 - 1e-12)["dropped"] == 2**32 - 1


def test_other_seeds_other_dropouts_and_other_places_are_independent() -> None:
    count = 1 << 16
    base = kept(5, 0, 1 << 31, (count,))
    others = {
        "seed": kept(6, 0, 1 << 31, (count,)),
        "high word of the seed": kept(5 + (1 << 32), 0, 1 << 31, (count,)),
        "number": kept(5, 1, 1 << 31, (count,)),
        "place": words(5, 0, count, start=count) >= np.uint32(1 << 31),
        "place above 2^34": words(5, 0, count, start=1 << 34) >= np.uint32(1 << 31),
    }
    for name, other in others.items():
        assert abs((base == other).mean() - 0.5) < 5 * 0.5 / count**0.5, name


def test_a_place_does_not_depend_on_where_the_words_begin() -> None:
    whole = words(9, 4, 1000)
    for start in (1, 2, 3, 4, 501):
        np.testing.assert_array_equal(words(9, 4, 400, start=start), whole[start : start + 400])


@needs_kernels
def test_what_is_dropped_is_0_whatever_it_was() -> None:
    x, flags = np.full(4096, np.inf, np.float32), attributes(0.5)
    y = on_cpu(x, 3, flags)
    mask = kept(3, 0, int(flags["dropped"]), x.shape)
    assert np.isinf(y[mask]).all()
    assert not y[~mask].any()


@needs_kernels
def test_a_node_with_several_seeds_is_refused() -> None:
    with pytest.raises(native.InvalidArgument, match="one seed"):
        compute("Dropout", np.arange(2), np.arange(1), np.ones(4, np.float32), **attributes(0.5))
