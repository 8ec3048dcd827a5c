"""What ONNX Runtime says of a step that failed, in one sentence."""

from __future__ import annotations

from messages import says

from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.sessions.failures import run_failure


def test_cuda_errors_through_onnx_runtime_are_one_sentence() -> None:
    message = (
        "Error in execution: /onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:154 "
        "std::conditional_t<THRW, void, onnxruntime::common::Status> onnxruntime::CudaCall(...) "
        "CUDA failure 900: operation not permitted when stream is capturing ; GPU=0 ; hostname=vm ; "
        "file=/x/cuda_call.h ; line=73 ; expr=cudaStreamSynchronize(stream); "
    )
    error = run_failure(message)
    assert isinstance(error, OrtflowError)
    assert says(str(error), "ONNX Runtime failed in a step: … cudaStreamSynchronize(stream) … (CUDA error 900)")
