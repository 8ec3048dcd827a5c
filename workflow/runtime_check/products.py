"""Cases of matrix products and of the nodes that the optimiser fuses with them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ortflow.workflow.runtime_check.case import Case, ints, node, normal


def cases() -> Iterator[Case]:
    """All cases."""
    yield _by_vector()
    yield from _attention()
    yield _gemm()
    yield from _normalised()
    yield _long()


def _by_vector() -> Case:
    w, v = normal(40, 6, 4), normal(41, 6)
    nodes = [node("Transpose", "w", "t", perm=[1, 0]), node("MatMul", "t v", "p"), node("Add", "x p", "y")]
    x = normal(42, 3, 4)
    y = x + w.T.astype(np.float64) @ v
    return Case(
        "MatMul of a transposed matrix and a vector", nodes, {"x": x}, {"y": y}, {"w": w, "v": v},
        optimizers=("MatmulTransposeFusion",),
    )  # fmt: skip


def _attention() -> Iterator[Case]:
    """Permutations with the batch at any position, a scale, and a product whose result is permuted."""
    q, k = normal(43, 2, 5, 3, 4), normal(44, 2, 6, 3, 4)
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 3, 0), (0, 2, 3, 1)):
        nodes = [
            node("Transpose", "q", "qt", perm=[0, 2, 1, 3]),
            node("Transpose", "k", "kt", perm=[0, 2, 3, 1]),
            node("Mul", "qt factor", "scaled"),
            node("MatMul", "scaled kt", "scores"),
            node("Transpose", "scores", "y", perm=order),
        ]
        yield Case(
            f"MatMul between Transpose nodes ({', '.join(map(str, order))})", nodes, {"q": q, "k": k},
            {"y": scores.transpose(order) * 0.5}, {}, {"factor": np.float32(0.5)},
            optimizers=("MatmulTransposeFusion", "MatMulScaleFusion"),
        )  # fmt: skip


def _gemm() -> Case:
    w, b, x = normal(45, 4, 4), normal(46, 4), normal(47, 3, 4)
    nodes = [
        node("Transpose", "w", "same", perm=[0, 1]),
        node("Transpose", "w", "turned", perm=[1, 0]),
        node("Gemm", "x same b", "h"),
        node("Gemm", "h turned b", "y", alpha=0.5, beta=2.0),
    ]
    y = (x.astype(np.float64) @ w + b) @ w.T * 0.5 + 2 * b.astype(np.float64)
    return Case(
        "Gemm after Transpose", nodes, {"x": x}, {"y": y}, {"w": w, "b": b}, optimizers=("GemmTransposeFusion",)
    )


def _normalised() -> Iterator[Case]:
    w, x = normal(48, 4, 6), normal(49, 2, 3, 4)
    scale, bias, mean = (normal(50 + i, 6) for i in range(3))
    variance = 1 + normal(53, 6) ** 2
    product = x.astype(np.float64) @ w
    normalised = (product - mean) / np.sqrt(variance.astype(np.float64) + 1e-5) * scale + bias
    weights = {"w": w, "scale": scale, "bias": bias, "mean": mean, "variance": variance}
    norm = node("BatchNormalization", "rows scale bias mean variance", "y")
    behind = {
        "Reshape": (node("Reshape", "p flat", "rows"), normalised.reshape(6, 6)),
        "Transpose": (node("Transpose", "p", "rows", perm=[0, 2, 1]), normalised.transpose(0, 2, 1)),
    }
    for name, (between, y) in behind.items():
        yield Case(
            f"BatchNormalization after MatMul and {name}", [node("MatMul", "x w", "p"), between, norm], {"x": x},
            {"y": y}, weights, {"flat": ints(-1, 6)}, optimizers=("MatMul_BatchNormalization_Fusion",),
        )  # fmt: skip


def _long() -> Case:
    """Sums in single precision at least: half precision would be off by 1e-3."""
    a, b = normal(54, 8, 4096), normal(55, 4096, 8)
    y = a.astype(np.float64) @ b
    return Case(
        "MatMul in single precision", [node("MatMul", "a b", "y")], {"a": a}, {"y": y}, {"b": b}, tolerance=1e-6
    )
