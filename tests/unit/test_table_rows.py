"""Tables whose gradient is exchanged by rows: which ones, what the graph computes then, and the sum over the ranks."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from emulated_cuda import EmulatedCall, Memory, needs_emulation, to_bytes
from fake_cuda import FakeCuda, fake_device
from gpu_tables import LENGTH, tables_in
from lazy_cuda import LazyCuda, LazyNccl
from onnx import TensorProto, helper
from thread_wire import on_threads

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.cuda.operators import Tensor as OnDevice
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import CudaBuffer
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.buckets import OPERATOR, ROWS, TOKEN, Bucket, buckets_of, with_buckets
from ortflow.workflow.fusion.table_rows import TableRows, with_rows
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.trainer.overlap import Overlap
from ortflow.workflow.trainer.table_exchange import TableExchange, gathered_size

FLOAT, BF16, INT64 = TensorProto.FLOAT, TensorProto.BFLOAT16, TensorProto.INT64
HEIGHT, WIDTH, ENTRIES = 50, 8, 6
INDEX = FlatIndex.place(
    [Tensor("table", (HEIGHT, WIDTH), "decay"), Tensor("w", (16, 8), "decay"), Tensor("b", (8,), "no_decay")]
)
ELEMENTS = {"ids": ENTRIES}
EMULATOR = threading.Lock()


def node(kind: str, inputs: Sequence[str], out: str, domain: str = CUDA_DOMAIN, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [out], out, domain=domain, **attributes)


def graph_of(*nodes: onnx.NodeProto, kinds: Mapping[str, int] | None = None, more: Sequence[str] = ()) -> Any:
    """The end of a training graph: `dx` is the gradient of what was looked up."""
    inputs = [
        helper.make_tensor_value_info("ids", INT64, ["batch", 3]),
        helper.make_tensor_value_info("dx", BF16, ["batch", 3, WIDTH]),
        *(helper.make_tensor_value_info(name, BF16, [16, 8]) for name in ("p", "q")),
    ]
    gradients = [("table_grad", [HEIGHT, WIDTH]), ("w_grad", [16, 8]), ("b_grad", [8])]
    outputs = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in gradients]
    outputs += [helper.make_tensor_value_info(name, FLOAT, None) for name in more]
    further = [node("Product", ["p", "q"], "w_grad"), node("ColumnSums", ["dx"], "b_grad")]
    values = [helper.make_tensor_value_info(name, kind, None) for name, kind in (kinds or {}).items()]
    graph = helper.make_graph([*nodes, *further], "g", inputs, outputs, value_info=values)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CUDA_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets)


TIED = [node("Product", ["p", "q"], "head"), node("TableGrad", ["ids", "dx", "head"], "table_grad", rows=HEIGHT)]


def rows_of(model: onnx.ModelProto, ranks: int = 2, **settings: Any) -> tuple[onnx.ModelProto, list[TableRows]]:
    given: dict[str, Any] = {"elements": ELEMENTS, "least": HEIGHT * WIDTH, **settings}
    return with_rows(model, INDEX, given["elements"], ranks, given["least"])


def test_the_output_layer_s_part_of_a_shared_table_is_its_gradient_in_fp32() -> None:
    made, rows = rows_of(graph_of(*TIED, kinds={"head": BF16}))
    assert rows == [TableRows("table", ENTRIES, BF16, adds=True)]
    (product,) = (each for each in made.graph.node if "table_grad" in each.output)
    assert (product.op_type, list(product.input)) == ("Product", ["p", "q"])
    assert not {"head", "table_grad"}.intersection(value.name for value in made.graph.value_info)
    (output,) = (value for value in made.graph.output if value.name == "table_grad")
    assert output.type.tensor_type.elem_type == FLOAT
    (handed,) = (each for each in made.graph.node if each.op_type == ROWS)
    assert list(handed.input) == ["ids", "dx"]


def test_what_only_gives_halves_is_widened() -> None:
    halves = [node("Transpose", ["t"], "head", ""), TIED[1]]
    made, rows = rows_of(graph_of(node("Product", ["p", "q"], "t"), *halves, kinds={"head": BF16, "t": BF16}))
    assert [each.adds for each in rows] == [True]
    (cast,) = (each for each in made.graph.node if "table_grad" in each.output)
    assert (cast.op_type, list(cast.input), cast.attribute[0].i) == ("Cast", ["head"], FLOAT)


def test_a_table_that_is_only_looked_up_has_no_gradient_in_the_graph() -> None:
    made, rows = rows_of(graph_of(node("TableGrad", ["ids", "dx"], "table_grad", rows=HEIGHT)))
    assert rows == [TableRows("table", ENTRIES, BF16, adds=False)]
    assert [value.name for value in made.graph.output] == ["w_grad", "b_grad"]
    made, order = with_buckets(made, buckets_of(INDEX, 1, ["table"]))
    assert [bucket.names for bucket in order] == [("w",), ("b",)]


def test_look_ups_of_one_table_are_added_one_after_the_other() -> None:
    """Encoder and decoder of T5."""
    model = graph_of(
        TIED[0],
        node("TableGrad", ["ids", "dx", "head"], "first", rows=HEIGHT),
        node("Reshape", ["more", "shape"], "flat", ""),
        node("TableGrad", ["flat", "dx", "first"], "table_grad", rows=HEIGHT),
        kinds={"head": FLOAT, "first": BF16, "flat": INT64},
    )
    for name in ("more", "shape"):
        model.graph.input.append(helper.make_tensor_value_info(name, INT64, None))
    made, rows = rows_of(model, elements={"ids": 3, "more": 4})
    assert rows == [TableRows("table", 3, BF16, adds=True), TableRows("table", 4, BF16, adds=True)]
    assert [list(each.input[:2]) for each in made.graph.node if each.op_type == ROWS] == [["ids", "dx"], ["flat", "dx"]]


@pytest.mark.parametrize(
    "case",
    ["small", "unknown", "many ranks", "read elsewhere", "addend read", "addend is an output", "other sum", "vector"],
)
def test_other_tables_are_summed_whole(case: str) -> None:
    nodes, more, settings = [*TIED], list[str](), dict[str, Any]()
    if case == "small":
        settings["least"] = HEIGHT * WIDTH + 1
    elif case == "unknown":
        settings["elements"] = {"others": ENTRIES}
    elif case == "many ranks":
        # 17 x 6 rows of bf16 are more than the 50 of fp32 that an all-reduce sends.
        settings["ranks"] = 17
    elif case == "read elsewhere":
        nodes.append(node("Neg", ["table_grad"], "z", ""))
        more.append("z")
    elif case == "addend read":
        nodes.append(node("Neg", ["head"], "z", ""))
        more.append("z")
    elif case == "addend is an output":
        more.append("head")
    elif case == "other sum":
        nodes[1:] = [
            node("TableGrad", ["ids", "dx"], "rows", rows=HEIGHT), node("Add", ["head", "rows"], "table_grad", ""),
        ]  # fmt: skip
    model = graph_of(*nodes, kinds={"head": FLOAT, "rows": FLOAT}, more=more)
    made, rows = rows_of(model, **settings) if case != "vector" else rows_of_vector(model)
    assert not rows
    assert [each.op_type for each in made.graph.node if each.op_type == ROWS] == []
    assert sorted(v.name for v in made.graph.output) == sorted(v.name for v in model.graph.output)
    if case == "many ranks":
        assert rows_of(model, ranks=16)[1]


def rows_of_vector(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[TableRows]]:
    index = FlatIndex.place([Tensor("table", (HEIGHT * WIDTH,), "decay")])
    return with_rows(model, index, ELEMENTS, 2, 1)


def test_all_ranks_run_buckets_and_rows_in_one_order() -> None:
    made, rows = rows_of(graph_of(*TIED, kinds={"head": BF16}))
    made, order = with_buckets(made, buckets_of(INDEX, 1, [each.table for each in rows]))
    token = ""
    chained = [each for each in made.graph.node if each.op_type in (OPERATOR, ROWS)]
    assert len(chained) == len(order) + 1
    for each in chained:
        assert not token or each.input[-1] == token
        token = each.output[0]
    assert token == TOKEN
    assert [v.name for v in made.graph.output].count(TOKEN) == 1


def test_a_table_is_a_bucket_of_its_own() -> None:
    index = FlatIndex.place(Tensor(name, (4, 2), "decay") for name in "abcd")
    assert [bucket.names for bucket in buckets_of(index, 1000, ["b"])] == [("a",), ("b",), ("c", "d")]


class Kernels:
    """What `TableExchange` needs of operators, on a fake GPU."""

    stream = 0

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._memories = device, list[Memory]()

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def scratch(self, size: int) -> int:
        self._memories.append(Memory(size))
        return self._memories[-1].pointer

    def launch(self, source: str, function: str, grid: Any, block: Any, arguments: Any, *more: Any) -> None:
        # Emulated threads are those of one kernel at a time.
        with EMULATOR:
            EmulatedCall([], []).launch(source, function, grid, block, *arguments)

    def check(self) -> None:
        for memory in self._memories:
            memory.check()


def tensor(array: Any, kind: int, kept: list[Any]) -> OnDevice:
    content = to_bytes(array, kind)
    kept.append(content)
    return OnDevice(content.ctypes.data, array.shape, kind)


def summing(
    below: Communicator, library: LazyNccl, rows: TableRows, buckets: Sequence[Bucket]
) -> tuple[NcclCommunicator, CudaBuffer, Overlap, Kernels]:
    """A rank, its flat gradient with five numbers behind it, and its sums."""
    cuda = LazyCuda()
    library.here(cuda)
    device = fake_device(cuda)
    world, kernels = NcclCommunicator(below, device, library), Kernels(device)
    sync = device.allocate(INDEX.trained + 5, np.float32)
    part = sync.slice(0, HEIGHT * WIDTH)
    table = TableExchange(rows, world, device, kernels, part, (HEIGHT, WIDTH))  # type: ignore[arg-type]
    return world, sync, Overlap(world, world, sync, INDEX.trained, buckets, [table]), kernels


@needs_emulation
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("kind", [BF16, FLOAT, TensorProto.FLOAT16])
@pytest.mark.parametrize("counts", [(6, 6), (6, 2), (4, 0), (0, 0, 3)])
def test_every_rank_has_the_sum_of_all_rows_and_buckets(counts: tuple[int, ...], kind: int, *, adds: bool) -> None:
    library, ranks = LazyNccl(), len(counts)
    buckets = buckets_of(INDEX, 1, ["table"])[0 if adds else 1 :]

    def of(rank: int, turn: int) -> tuple[Any, Any, Any]:
        """Flat gradient, indices and their gradients; a rank without samples has none."""
        # Another rank has fewer in the second turn: what an earlier one left is not exchanged again.
        random, count = np.random.default_rng([rank, kind, turn]), counts[:: 1 - 2 * turn][rank]
        flat = random.integers(-8, 8, INDEX.trained + 5).astype("float32") * (count > 0)
        # As in a run, nothing is between the tensors.
        flat[HEIGHT * WIDTH : INDEX["w"].offset] = 0
        indices = np.where(random.random(count) < 0.5, 7, random.integers(-HEIGHT, HEIGHT, count))
        gradient = random.integers(-8, 8, (count, WIDTH)).astype("float32")
        return flat, indices, gradient

    def expected(turn: int) -> Any:
        given = [of(rank, turn) for rank in range(ranks)]
        total = np.sum([flat for flat, *_ in given], axis=0)
        if not adds:
            total[: HEIGHT * WIDTH] = 0
        for _, indices, gradient in given:
            np.add.at(total[: HEIGHT * WIDTH].reshape(HEIGHT, WIDTH), indices, gradient)
        return total

    def program(below: Communicator) -> bytes:
        given = TableRows("table", ENTRIES, kind, adds)
        world, sync, overlap, kernels = summing(below, library, given, buckets)
        kept: list[Any] = []
        for turn in range(2):
            flat, indices, gradient = of(below.rank, turn)
            sync.write(flat)
            if len(indices):
                overlap.begin()
                for number, bucket in enumerate(buckets):
                    overlap.ready(number, [sync.pointer + 4 * bucket.start])
                overlap.rows(0, tensor(indices, INT64, kept), tensor(gradient, kind, kept))
            overlap.finish()
            np.testing.assert_array_equal(sync.read()[: INDEX.trained], expected(turn)[: INDEX.trained])
        kernels.check()
        found = sync.read().tobytes()
        world.close()
        return found

    assert len(set(on_threads(ranks, program))) == 1


def on_one_rank(check: Callable[[CudaBuffer, Overlap, list[Any]], None]) -> LazyNccl:
    """Call `check` with a rank's gradient, which is 1, and its sums; what NCCL was asked for."""
    library = LazyNccl()

    def program(below: Communicator) -> None:
        rows = TableRows("table", ENTRIES, BF16, adds=True)
        world, sync, overlap, _ = summing(below, library, rows, buckets_of(INDEX, 1))
        sync.fill(1)
        check(sync, overlap, [])
        world.close()

    on_threads(1, program)
    return library


@needs_emulation
def test_outside_of_a_step_a_rank_adds_its_own_rows() -> None:
    """As in the check of the gradient, where ranks compute different things."""

    def check(sync: CudaBuffer, overlap: Overlap, kept: list[Any]) -> None:
        # More than a step's micro-batch has.
        indices, gradient = np.full(ENTRIES + 3, 4), np.full((ENTRIES + 3, WIDTH), 2.0)
        overlap.rows(0, tensor(indices, INT64, kept), tensor(gradient, BF16, kept))
        found = sync.read()[: HEIGHT * WIDTH].reshape(HEIGHT, WIDTH)
        assert (found[4] == 1 + 2 * (ENTRIES + 3)).all()
        assert (np.delete(found, 4, axis=0) == 1).all()
        overlap.begin()
        with pytest.raises(OrtflowError, match="9 indices of 'table' and not 6 at most"):
            overlap.rows(0, tensor(indices, INT64, kept), tensor(gradient, BF16, kept))

    assert "ncclAllGather" not in on_one_rank(check).calls


@pytest.mark.parametrize("kind", [BF16, FLOAT])
def test_the_size_of_the_buffers_is_what_is_allocated(kind: int) -> None:
    cuda, ranks = FakeCuda(), 3
    device = fake_device(cuda)
    part = device.allocate(HEIGHT * WIDTH, np.float32)
    world: Any = SimpleNamespace(world_size=ranks, rank=1)
    rows, before = TableRows("table", 600, kind, adds=True), set(cuda.blocks)
    made = TableExchange(rows, world, device, None, part, (HEIGHT, WIDTH))  # type: ignore[arg-type]
    allocated = sum(cuda.blocks[address].nbytes for address in cuda.blocks.keys() - before)
    size = ranks * 600 * (8 + WIDTH * (2 if kind == BF16 else 4))
    assert gathered_size(rows, WIDTH, ranks) == size
    assert size <= allocated < size + 1024, "CUDA rounds up"
    del made


def test_tables_are_found_in_what_is_built(tmp_path: Path) -> None:
    graphs = tables_in(tmp_path)
    form, elements = onnx.load(Form.HALF.of(graphs.train)), graphs.elements(8)
    _, rows = with_rows(form, graphs.index, elements, 2, least=1)
    entries = 8 * LENGTH
    assert rows == [TableRows("shared", entries, BF16, adds=True), TableRows("other", entries, BF16, adds=False)]
    assert elements == {"ids": entries, "labels": 8}


@needs_emulation
def test_an_index_outside_of_a_table_makes_all_of_its_gradient_nan() -> None:
    """Also the rows that were not looked up, though the rest of the gradient is there already."""

    def check(sync: CudaBuffer, overlap: Overlap, kept: list[Any]) -> None:
        overlap.rows(0, tensor(np.array([3, HEIGHT]), INT64, kept), tensor(np.ones((2, WIDTH)), BF16, kept))
        assert np.isnan(sync.read()[: HEIGHT * WIDTH]).all()

    on_one_rank(check)
