"""Which operators ONNX Runtime 1.19.2 can differentiate on the CPU.

Found by building a one-node model of each operator that ONNX and ONNX Runtime define, differentiating it with the
wheel's GradientGraphBuilder, running the result, and comparing with finite differences; a test does it again and
fails when this table and the wheel part. Operators whose gradient is right only in some of their forms are in
here, and `repair` brings them to such a form.
"""

from __future__ import annotations

ONNX_GRADIENTS = frozenset(
    [
        "Abs",
        "Add",
        "AveragePool",
        "BatchNormalization",
        "Cast",
        "Clip",
        "Concat",
        "Conv",
        "Cos",
        "Div",
        "Dropout",
        "Erf",
        "Exp",
        "Expand",
        "Flatten",
        "GRU",
        "Gather",
        "GatherElements",
        "GatherND",
        "Gemm",
        "GlobalAveragePool",
        "Identity",
        "LSTM",
        "LayerNormalization",
        "LeakyRelu",
        "Log",
        "LogSoftmax",
        "MatMul",
        "Max",
        "MaxPool",
        "Min",
        "Mul",
        "Neg",
        "Pad",
        "Pow",
        "Reciprocal",
        "ReduceL2",
        "ReduceLogSumExp",
        "ReduceMean",
        "ReduceSum",
        "Relu",
        "Reshape",
        "ScatterElements",
        "ScatterND",
        "Sigmoid",
        "SimplifiedLayerNormalization",
        "Sin",
        "Slice",
        "Softmax",
        "SoftmaxCrossEntropyLoss",
        "Split",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Tanh",
        "Tile",
        "TopK",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
    ]
)
"""Operators of ONNX's own domain (and SimplifiedLayerNormalization, which ONNX Runtime adds to it)."""

MICROSOFT_GRADIENTS = frozenset(["BiasGelu", "FastGelu", "Gelu", "QuickGelu", "Trilu"])
"""Operators of ONNX Runtime's domain, com.microsoft."""

NAMES_EVERY_GRADIENT = frozenset(
    ["BatchNormalization", "BiasGelu", "Concat", "FastGelu", "LayerNormalization", "SimplifiedLayerNormalization"]
)
"""Operators whose gradient nodes write the gradients of all inputs, of fixed ones too.

Where two of them read one fixed value, its gradient would have two nodes of origin.
"""


def has_gradient(domain: str, op_type: str) -> bool:
    """Whether ONNX Runtime differentiates the operator."""
    return op_type in (MICROSOFT_GRADIENTS if domain == "com.microsoft" else ONNX_GRADIENTS)
