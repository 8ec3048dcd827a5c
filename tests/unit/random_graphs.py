"""Small graphs drawn from a seed: products, rearrangements, elementwise chains, reductions, normalisations.

Their operators are combined as no person would write them, but as exporters do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIZES = (2, 3, 4, 5)
LARGEST = 3000
UNARY = (
    "Relu",
    "Tanh",
    "Sigmoid",
    "Neg",
    "Abs",
    "Erf",
    "Identity",
    "Softplus",
    "LeakyRelu",
    "Elu",
    "Sin",
    "HardSigmoid",
)
REDUCTIONS = ("Sum", "Mean", "Max", "Min", "L2", "SumSquare", "LogSumExp")


class RandomGraph:
    """One graph: `feeds` are its inputs' values, `weights` its initializers', `outputs` values that no node reads."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.feeds: dict[str, np.ndarray] = {}
        self.weights: dict[str, np.ndarray] = {}
        self.constants: dict[str, np.ndarray] = {}
        for _ in range(2):
            self.tensor(*self.rng.choice(SIZES, self.rng.integers(1, 5)))
        makers = [self.product] * 6 + [self.product_from_left] * 3 + [self.gemm] * 2 + [self.transpose] * 5
        makers += [self.reshape] * 2 + [self.unsqueeze] * 2 + [self.squeeze] * 2 + [self.unary] * 3 + [self.pair] * 5
        makers += [self.reduce] * 3 + [self.softmax, self.concat, self.slice, self.gather, self.norm, self.gelu]
        makers += [self.expand, self.convolution, self.convolution, self.batch_norm, self.where]
        for _ in range(self.rng.integers(3, 14)):
            if max(map(math.prod, self.shapes.values())) < LARGEST:
                makers[self.rng.integers(len(makers))]()
        read = {name for node in self.nodes for name in node.input}
        self.outputs = [node.output[0] for node in self.nodes if node.output[0] not in read]
        self.feeds = {name: array for name, array in self.feeds.items() if name in read}
        self.weights = {name: array for name, array in self.weights.items() if name in read}

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "random",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, a.shape) for name, a in self.feeds.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in self.outputs],
            initializer=[numpy_helper.from_array(a, n) for n, a in {**self.weights, **self.constants}.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def tensor(self, *shape: int) -> str:
        """A new input or weight."""
        name = f"v{len(self.feeds) + len(self.weights)}"
        array = self.rng.normal(size=tuple(int(n) for n in shape)).astype(np.float32)
        (self.feeds if self.chance(0.5) else self.weights)[name] = array
        self.shapes[name] = array.shape
        return name

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.array(value, dtype)
        return name

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def node(self, op_type: str, *inputs: str, shape: tuple[int, ...] | list[int], **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], f"{op_type}{len(self.nodes)}", **attributes))
        self.shapes[name] = tuple(int(n) for n in shape)
        return name

    def some(self, least: int = 0, most: int = 9) -> str | None:
        """A value of so many axes, preferably a late one."""
        names = [name for name, shape in self.shapes.items() if least <= len(shape) <= most]
        names = names[-4:] if self.chance(0.6) else names
        return names[self.rng.integers(len(names))] if names else None

    def size(self) -> int:
        return int(self.rng.choice(SIZES))

    def turned(self, *shape: int) -> str:
        """A new tensor of this shape, or the transpose of one with its last two axes swapped."""
        if len(shape) < 2 or self.chance(0.5):
            return self.tensor(*shape)
        order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        return self.node("Transpose", self.tensor(*(shape[i] for i in order)), shape=shape, perm=order)

    def matmul(self, a: str, b: str) -> str:
        shape = np.matmul(np.zeros(self.shapes[a]), np.zeros(self.shapes[b])).shape
        return self.node("MatMul", a, b, shape=shape)

    def product(self) -> None:
        if a := self.some(1):
            *batch, depth = self.shapes[a]
            kinds = [(depth,), (depth, self.size()), (*batch[:-1], depth, self.size())]
            if len(batch) < 2 or batch[-2] in (1, 2):
                kinds.append((2, depth, self.size()))
            self.matmul(a, self.turned(*kinds[self.rng.integers(len(kinds))]))

    def product_from_left(self) -> None:
        if b := self.some(1):
            depth = self.shapes[b][-2] if len(self.shapes[b]) > 1 else self.shapes[b][0]
            self.matmul(self.tensor(depth) if self.chance(0.3) else self.turned(self.size(), depth), b)

    def gemm(self) -> None:
        if a := self.some(2, 2):
            turn_a, turn_b = (int(n) for n in self.rng.integers(0, 2, 2))
            rows, depth = self.shapes[a][::-1] if turn_a else self.shapes[a]
            width = self.size()
            b = self.turned(width, depth) if turn_b else self.turned(depth, width)
            bias = [(), (width,), (rows, 1), (1,), (rows, width)][self.rng.integers(5)]
            c = [self.tensor(*bias)] if bias else []
            alpha, beta = (float(n) for n in self.rng.choice([1.0, 0.5], 2))
            self.node("Gemm", a, b, *c, shape=(rows, width), transA=turn_a, transB=turn_b, alpha=alpha, beta=beta)

    def transpose(self) -> None:
        if x := self.some(2):
            shape = self.shapes[x]
            order = [int(i) for i in self.rng.permutation(len(shape))]
            if self.chance(0.5):
                order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            self.node("Transpose", x, shape=[shape[i] for i in order], perm=order)

    def reshape(self) -> None:
        if x := self.some(1):
            shape = self.shapes[x]
            targets = [(-1,), (shape[0], -1), (-1, shape[-1]), (1, *shape), (*shape, 1)]
            target = targets[self.rng.integers(len(targets))]
            self.node("Reshape", x, self.ints(*target), shape=np.zeros(shape).reshape(target).shape)

    def unsqueeze(self) -> None:
        if x := self.some(0, 3):
            axis = int(self.rng.integers(len(self.shapes[x]) + 1))
            self.node("Unsqueeze", x, self.ints(axis), shape=np.expand_dims(np.zeros(self.shapes[x]), axis).shape)

    def squeeze(self) -> None:
        x = self.some(1)
        if x and 1 in self.shapes[x]:
            axis = self.shapes[x].index(1)
            self.node("Squeeze", x, self.ints(axis), shape=np.squeeze(np.zeros(self.shapes[x]), axis).shape)

    def unary(self) -> None:
        if x := self.some():
            self.node(str(self.rng.choice(UNARY)), x, shape=self.shapes[x])

    def pair(self) -> None:
        if x := self.some():
            shape = self.shapes[x]
            other = (1,)
            kind = self.rng.integers(3)
            if kind == 0:
                y = x
            elif kind == 1:
                y = self.constant(self.rng.choice([0, 1, 2, 0.5, 1e-5]))
            else:
                other = tuple(n if self.chance(0.6) else 1 for n in shape)[self.rng.integers(len(shape) + 1) :]
                y = self.tensor(*other)
            op_type = str(self.rng.choice(["Add", "Sub", "Mul", "Max", "Min", "Div"]))
            if op_type == "Div":
                square = self.node("Mul", y, y, shape=self.shapes.get(y, ()))
                y = self.node("Add", square, self.constant(0.5), shape=self.shapes[square])
            order = (x, y) if self.chance(0.6) or op_type == "Div" else (y, x)
            self.node(op_type, *order, shape=shape)

    def reduce(self) -> None:
        if x := self.some(1):
            shape = self.shapes[x]
            axes = self.rng.choice(len(shape), self.rng.integers(1, len(shape) + 1), replace=False).tolist()
            keep = int(self.chance(0.5))
            result = [1 if i in axes else n for i, n in enumerate(shape) if keep or i not in axes]
            signed = [i - len(shape) if self.chance(0.5) else i for i in axes]
            op_type = f"Reduce{self.rng.choice(REDUCTIONS)}"
            self.node(op_type, x, self.ints(*signed), shape=result, keepdims=keep)

    def softmax(self) -> None:
        if x := self.some(1):
            axis = int(self.rng.integers(-len(self.shapes[x]), len(self.shapes[x])))
            self.node(str(self.rng.choice(["Softmax", "LogSoftmax"])), x, shape=self.shapes[x], axis=axis)

    def concat(self) -> None:
        if x := self.some(1):
            shape = list(self.shapes[x])
            axis, parts = int(self.rng.integers(len(shape))), [x, self.tensor(*shape)] + [x] * self.chance(0.3)
            shape[axis] *= len(parts)
            self.node("Concat", *parts, shape=shape, axis=axis)

    def slice(self) -> None:
        if x := self.some(1):
            shape = list(self.shapes[x])
            axis = int(self.rng.integers(len(shape)))
            start, end, step = (-1, -99, -1) if self.chance(0.3) else (int(self.rng.integers(2)), 99, 1)
            shape[axis] = shape[axis] if step < 0 else shape[axis] - start
            if shape[axis]:
                self.node("Slice", x, *(self.ints(n) for n in (start, end, axis, step)), shape=shape)

    def gather(self) -> None:
        if x := self.some(1, 3):
            shape = list(self.shapes[x])
            axis = int(self.rng.integers(len(shape)))
            count = [(), (1,), (3,), (2, 2)][self.rng.integers(4)]
            places = self.rng.integers(-shape[axis], shape[axis], count)
            shape[axis : axis + 1] = count
            self.node("Gather", x, self.constant(places, np.int64), shape=shape, axis=axis)

    def norm(self) -> None:
        """LayerNormalization as exporters decompose it."""
        if x := self.some(1):
            shape = self.shapes[x]
            low = (*shape[:-1], 1)
            last = self.ints(-1)
            moved = self.node("Sub", x, self.node("ReduceMean", x, last, shape=low, keepdims=1), shape=shape)
            square = self.node("Pow", moved, self.constant(2.0), shape=shape)
            variance = self.node("ReduceMean", square, last, shape=low, keepdims=1)
            deviation = self.node("Sqrt", self.node("Add", variance, self.constant(1e-2), shape=low), shape=low)
            y = self.node("Div", moved, deviation, shape=shape)
            y = self.node("Mul", y, self.tensor(shape[-1]), shape=shape) if self.chance(0.7) else y
            if self.chance(0.7):
                self.node("Add", y, self.tensor(shape[-1]), shape=shape)

    def gelu(self) -> None:
        if x := self.some():
            shape = self.shapes[x]
            erf = self.node("Erf", self.node("Div", x, self.constant(math.sqrt(2)), shape=shape), shape=shape)
            product = self.node("Mul", x, self.node("Add", erf, self.constant(1.0), shape=shape), shape=shape)
            self.node("Mul", product, self.constant(0.5), shape=shape)

    def expand(self) -> None:
        if x := self.some(0, 3):
            shape = (2, *self.shapes[x])
            self.node("Expand", x, self.ints(*shape), shape=shape)

    def convolution(self) -> None:
        x = self.some(4, 4)
        if x and min(self.shapes[x][2:]) > 1:
            batch, channels, *sides = self.shapes[x]
            side = 1 + self.chance(0.5)
            bias = [self.tensor(3)] if self.chance(0.5) else []
            shape = (batch, 3, *(n - side + 1 for n in sides))
            y = self.node("Conv", x, self.tensor(3, channels, side, side), *bias, shape=shape)
            if self.chance(0.5):
                y = self.node("Relu", y, shape=shape)
            if self.chance(0.5):
                self.normalized(y)

    def batch_norm(self) -> None:
        if x := self.some(2):
            self.normalized(x)

    def normalized(self, x: str) -> None:
        channels = self.shapes[x][1]
        mean, scale, bias = (self.constant(self.rng.normal(size=channels)) for _ in range(3))
        variance = self.constant(self.rng.uniform(0.5, 2, size=channels))
        self.node("BatchNormalization", x, scale, bias, mean, variance, shape=self.shapes[x])

    def where(self) -> None:
        if x := self.some():
            name = f"positive{len(self.nodes)}"
            self.nodes.append(helper.make_node("Greater", [x, self.constant(0.0)], [name], name))
            other = self.constant(-1.0) if self.chance(0.5) else self.tensor(*self.shapes[x])
            self.node("Where", name, x, other, shape=self.shapes[x])
