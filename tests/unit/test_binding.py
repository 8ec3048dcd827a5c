"""GPU session inputs that ONNX Runtime reads on the CPU: it copies them when they are bound, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from ortflow.workflow.sessions.binding import Binding


class FakeSession:
    """A session whose input `w` a node on the CPU reads."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in ("x", "w")]

    def get_outputs(self) -> list[Any]:
        return []

    def get_input_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name="Cuda"), SimpleNamespace(name="Cpu")]

    def io_binding(self) -> Any:
        return SimpleNamespace(bind_input=lambda name, *_: self.done.append(name))

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self.done.append("run")


def test_what_the_cpu_reads_is_tied_before_each_run() -> None:
    session = FakeSession()
    device = SimpleNamespace(
        kind="cuda", index=0, capturing=False, synchronize=lambda: session.done.append("synchronize")
    )
    binding = Binding(cast(Any, session), cast(Any, device))
    assert binding.read_on_host == {"w"}
    for name in ("x", "w"):
        binding.read_from(name, cast(Any, SimpleNamespace(dtype=np.float32, pointer=64)), (2,))
    session.done.clear()
    for _ in range(2):
        binding.run()
    assert session.done == ["synchronize", "w", "run"] * 2


def test_on_the_cpu_nothing_is_copied() -> None:
    device = SimpleNamespace(kind="cpu", index=0, capturing=False)
    assert Binding(cast(Any, FakeSession()), cast(Any, device)).read_on_host == frozenset()
