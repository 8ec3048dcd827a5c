"""Sessions of ONNX Runtime have one thread in tests, unless the test or the product gives them a number.

By default a session has one for each core. With graphs this small they only wait for each other, and they spin while
they wait: beside another test on the same cores, the gradients of operators took twice the processor time.
"""

from __future__ import annotations

from typing import Any

from ortflow.workflow.onnx_runtime import onnxruntime

OPEN = onnxruntime.InferenceSession.__init__


def open_with_one_thread(session: Any, model: Any, sess_options: Any = None, *rest: Any, **named: Any) -> None:
    """As the constructor of a session."""
    options = onnxruntime.SessionOptions() if sess_options is None else sess_options
    options.intra_op_num_threads = options.intra_op_num_threads or 1
    OPEN(session, model, options, *rest, **named)


onnxruntime.InferenceSession.__init__ = open_with_one_thread
