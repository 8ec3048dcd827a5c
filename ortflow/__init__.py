"""ortflow: one run file trains any ONNX model on a laptop or a cluster, with bit-identical restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortflow import checkout

if TYPE_CHECKING:
    from ortflow.export import export_for_training
    from ortflow.gradient import grad

__all__ = ["__version__", "export_for_training", "grad"]

__version__ = "0.1.0"

checkout.check()


def __getattr__(name: str) -> Any:
    """Load the exporter and the differentiator on first access, so that `import ortflow` stays fast."""
    if name == "export_for_training":
        from ortflow.export import export_for_training

        return export_for_training
    if name == "grad":
        from ortflow.gradient import grad

        return grad
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
