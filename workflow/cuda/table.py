"""Every operator of `ortflow.cuda` that Python runs, by its name in model files."""

from __future__ import annotations

from collections.abc import Mapping

from ortflow.workflow.cuda import (
    attention,
    batch_norm,
    bucket,
    collective,
    convolution,
    cross_entropy,
    embedding,
    join,
    norm,
    pooling,
    product,
    rotary,
    scalars,
    shards,
    softmax,
    squares,
    sums,
    table_rows,
)
from ortflow.workflow.cuda.operators import Operator

OPERATORS: Mapping[str, type[Operator]] = {
    "Attention": attention.Attention,
    "AttentionGrad": attention.AttentionGrad,
    "BatchGradients": batch_norm.BatchGradients,
    "BatchStatistics": batch_norm.BatchStatistics,
    "BucketReady": bucket.BucketReady,
    "Collective": collective.Collective,
    "Convolution": convolution.Convolution,
    "ConvolutionDataGrad": convolution.ConvolutionDataGrad,
    "ConvolutionWeightGrad": convolution.ConvolutionWeightGrad,
    "Join": join.Join,
    "LayerNormalization": norm.LayerNormalization,
    "LayerNormalizationGrad": norm.LayerNormalizationGrad,
    "MaxPool": pooling.MaxPool,
    "MaxPoolGrad": pooling.MaxPoolGrad,
    "RMSNormalization": norm.RMSNormalization,
    "RMSNormalizationGrad": norm.RMSNormalizationGrad,
    "CrossEntropy": cross_entropy.CrossEntropy,
    "CrossEntropyGrad": cross_entropy.CrossEntropyGrad,
    "CrossEntropyShare": cross_entropy.CrossEntropyShare,
    "CrossEntropyWithGrad": cross_entropy.CrossEntropyWithGrad,
    "ColumnSums": sums.ColumnSums,
    "Product": product.Product,
    "Rotary": rotary.Rotary,
    "RotaryGrad": rotary.RotaryGrad,
    "Scalars": scalars.Scalars,
    "ShardsBegin": shards.ShardsBegin,
    "ShardsReady": shards.ShardsReady,
    "ShardsSend": shards.ShardsSend,
    "SquareSum": squares.SquareSum,
    "TableGrad": embedding.TableGrad,
    "TableRows": table_rows.TableRows,
    "Softmax": softmax.Softmax,
    "SoftmaxGrad": softmax.SoftmaxGrad,
}
