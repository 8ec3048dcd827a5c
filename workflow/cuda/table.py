"""Every operator of `ortflow.cuda` that Python runs, by its name in model files."""

from __future__ import annotations

from collections.abc import Mapping

from ortflow.workflow.cuda import (
    attention,
    bucket,
    collective,
    cross_entropy,
    embedding,
    norm,
    product,
    scalars,
    softmax,
    squares,
    sums,
)
from ortflow.workflow.cuda.operators import Operator

OPERATORS: Mapping[str, type[Operator]] = {
    "Attention": attention.Attention,
    "AttentionGrad": attention.AttentionGrad,
    "BucketReady": bucket.BucketReady,
    "Collective": collective.Collective,
    "LayerNormalization": norm.LayerNormalization,
    "LayerNormalizationGrad": norm.LayerNormalizationGrad,
    "RMSNormalization": norm.RMSNormalization,
    "RMSNormalizationGrad": norm.RMSNormalizationGrad,
    "CrossEntropy": cross_entropy.CrossEntropy,
    "CrossEntropyGrad": cross_entropy.CrossEntropyGrad,
    "CrossEntropyWithGrad": cross_entropy.CrossEntropyWithGrad,
    "ColumnSums": sums.ColumnSums,
    "Product": product.Product,
    "Scalars": scalars.Scalars,
    "SquareSum": squares.SquareSum,
    "TableGrad": embedding.TableGrad,
    "Softmax": softmax.Softmax,
    "SoftmaxGrad": softmax.SoftmaxGrad,
}
