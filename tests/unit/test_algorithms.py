"""Algorithms of products: the fastest is taken and kept, the same for every rank and every later attempt."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from onnx import TensorProto

from ortflow.workflow.cuda import algorithms, lt
from ortflow.workflow.cuda.algorithms import Choices, fastest
from ortflow.workflow.cuda.lt import Library, Place, Shape
from ortflow.workflow.errors import OrtflowError

HALF = int(TensorProto.BFLOAT16)
SHAPE = Shape(HALF, HALF, 64, 32, 16, turn_a=False, turn_b=False, bias=False)
PLACE = Place(a=256, b=512, result=1024, bias=0, workspace=4096, stream=77)


class FakeLt:
    """cuBLASLt that proposes an algorithm for each of `costs`: its time, or None where it fails."""

    def __init__(self, costs: list[float | None]) -> None:
        self.costs, self.queued = costs, 0.0
        self.used: list[int] = []
        self.preferred: dict[int, int] = {}
        self.cublasLtGetVersion: Any = Version()

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("cublasLt"), name
        return lambda *arguments: 0

    def cublasLtMatmulPreferenceSetAttribute(self, owner: Any, name: Any, value: Any, size: Any) -> int:  # noqa: N802
        self.preferred[name.value] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:  # noqa: N802
        *_, wanted, found, count = arguments
        count._obj.value = min(wanted.value, len(self.costs))
        for place in range(count._obj.value):
            found[place].algorithm[0], found[place].state = 100 + place, 0
        return 0

    def cublasLtMatmul(self, *arguments: Any) -> int:  # noqa: N802
        place = arguments[12]._obj[0] - 100
        self.used.append(place)
        cost = self.costs[place]
        self.queued += cost or 0.0
        return 15 if cost is None else 0


class Version:
    restype: Any = None

    def __call__(self) -> int:
        return 130000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time passes only while a fake GPU is waited for."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(lt, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    monkeypatch.setattr(lt, "preload", lambda: "")
    return now


def opened(fake: FakeLt, clock: SimpleNamespace, choices: Choices) -> Library:
    def wait(stream: int) -> None:
        assert stream == PLACE.stream
        clock.seconds, fake.queued = clock.seconds + fake.queued, 0.0

    cuda: Any = SimpleNamespace(wait=wait)
    return Library("H200", fake, cuda, choices)


def used(fake: FakeLt, library: Library, *, measures: bool = True) -> int:
    """The algorithm of one more product."""
    fake.used.clear()
    library.run(SHAPE, PLACE, measures=measures)
    return fake.used[-1]


def test_the_fastest_is_taken_and_measured_once(clock: SimpleNamespace, tmp_path: Path) -> None:
    fake = FakeLt([3.0, None, 1.0, 2.0])
    library = opened(fake, clock, Choices([tmp_path]))
    assert used(fake, library) == 2
    assert len(fake.used) > 3
    assert used(fake, library) == 2
    assert fake.used == [2]


def test_pieces_of_a_product_are_added_in_fp32_and_in_one_order(clock: SimpleNamespace, tmp_path: Path) -> None:
    fake = FakeLt([1.0])
    used(fake, opened(fake, clock, Choices([tmp_path])))
    reductions, compute_type = 3, 2
    assert fake.preferred[reductions] == compute_type


def test_noise_does_not_change_the_choice() -> None:
    assert fastest([1.0, 0.99, 1.1]) == 0
    assert fastest([1.0, 0.97, 0.96]) == 1
    assert fastest([None, 2.0, 1.99]) == 1
    with pytest.raises(ValueError, match="no algorithm"):
        fastest([None, None])


def test_a_later_start_takes_what_was_chosen_without_measuring(clock: SimpleNamespace, tmp_path: Path) -> None:
    fake = FakeLt([3.0, 1.0])
    assert used(fake, opened(fake, clock, Choices([tmp_path]))) == 1
    # On another node the first would be faster.
    other = FakeLt([1.0, 3.0])
    assert used(other, opened(other, clock, Choices([tmp_path]))) == 1
    assert other.used == [1]


def test_the_first_rank_to_choose_decides_for_the_run(clock: SimpleNamespace, tmp_path: Path) -> None:
    found = []
    for rank, costs in enumerate(([3.0, 1.0], [1.0, 3.0])):
        choices = Choices([tmp_path / f"cache-{rank}"])
        choices.keep_in(tmp_path / "run")
        fake = FakeLt(list(costs))
        library = opened(fake, clock, choices)
        if rank == 0:
            found.append(used(fake, library))
        else:
            # It looked before the other rank had chosen, and measured.
            find, choices.find = choices.find, lambda key: None  # type: ignore[method-assign]
            found.append(used(fake, library))
            choices.find = find  # type: ignore[method-assign]
            assert len(fake.used) > 3
    assert found == [1, 1]
    fresh = FakeLt([1.0, 3.0])
    assert used(fresh, opened(fresh, clock, Choices([tmp_path / "cache-1"]))) == 1


@pytest.mark.parametrize("run_full", [False, True])
def test_the_choice_of_the_run_counts_before_that_of_another_cache(tmp_path: Path, *, run_full: bool) -> None:
    theirs, ours = Choices([tmp_path / "cache-0"]), Choices([tmp_path / "cache-1"])
    theirs.keep_in(tmp_path / "run")
    theirs.settle("key", b"theirs")
    ours.settle("key", b"ours")
    if run_full:
        (tmp_path / "full").write_bytes(b"")  # no folder: nothing is kept in it
    ours.keep_in(tmp_path / ("full" if run_full else "run"))
    wanted = b"ours" if run_full else b"theirs"
    assert ours.find("key") == wanted
    assert ours.settle("key", b"measured") == wanted


def test_nothing_is_measured_while_a_graph_is_captured(clock: SimpleNamespace, tmp_path: Path) -> None:
    fake = FakeLt([3.0, 1.0])
    library = opened(fake, clock, Choices([tmp_path]))
    assert used(fake, library, measures=False) == 0
    assert fake.used == [0]
    assert used(fake, library) == 1


def test_a_damaged_choice_is_made_anew(clock: SimpleNamespace, tmp_path: Path) -> None:
    fake = FakeLt([3.0, 1.0])
    used(fake, opened(fake, clock, Choices([tmp_path])))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:40], whole.replace(b'"65', b'"64'), b"[]", b"\xff" * 100):
        assert damaged != whole
        file.write_bytes(damaged)
        assert used(fake, opened(fake, clock, Choices([tmp_path]))) == 1
        assert len(fake.used) > 3
        assert file.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_an_algorithm_that_the_library_does_not_propose_is_not_taken(clock: SimpleNamespace, tmp_path: Path) -> None:
    fake = FakeLt([3.0, 1.0])
    choices = Choices([tmp_path])
    library = opened(fake, clock, choices)
    choices.settle(f"{library.identity}, {SHAPE}, alignments (256, 256, 256, 256)", bytes((ctypes.c_uint64 * 8)(999)))
    assert used(fake, library) == 1


def test_a_disk_that_takes_nothing_does_not_stop_a_run(
    clock: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(algorithms, "write_atomically", full)
    fake = FakeLt([3.0, 1.0])
    assert used(fake, opened(fake, clock, Choices([tmp_path]))) == 1
    assert not [*tmp_path.iterdir()]


def test_a_shape_that_no_algorithm_computes(clock: SimpleNamespace, tmp_path: Path) -> None:
    fake = FakeLt([None, None])
    with pytest.raises(OrtflowError, match="no algorithm computed the product of Shape"):
        used(fake, opened(fake, clock, Choices([tmp_path])))
