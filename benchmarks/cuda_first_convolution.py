"""Speed of a network's first convolution, of three channels, against PyTorch's on the same GPU in the same run.

    python benchmarks/cuda_first_convolution.py [--batch 128 --rounds 5]

Images are fp32 with channels first, as a run gets them, and the convolution computes in bf16 with channels last: the
forward pass converts image and weight and convolves, the gradient of the weight reads what is converted. Prints the
median time of ortflow, in blocks of the stride's pixels (`workflow/cuda/blocks.py`); in parentheses that of its form
with single pixels; and PyTorch's with `cudnn.benchmark` as a multiple of the first: above 1 ortflow is faster. Results
have to agree before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from cuda_operators import Call, agree, time_of
from torch.nn import functional

from ortflow.workflow.cuda.blocks import Blocks
from ortflow.workflow.cuda.nvrtc import Compiler
from ortflow.workflow.cuda.table import OPERATORS

CHANNELS, SIZE, HALF = 3, 224, torch.bfloat16
FP32 = torch.float32


@dataclass(frozen=True)
class Case:
    """Windows of the same height and width."""

    name: str
    kernel: int
    stride: int
    pad: int
    outputs: int

    @property
    def attributes(self) -> dict[str, Any]:
        pairs = {"kernel_shape": self.kernel, "strides": self.stride, "dilations": 1}
        return {**{name: [size] * 2 for name, size in pairs.items()}, "pads": [self.pad] * 4, "channels_last": 1}


CASES = (
    Case("ResNet, 7 x 7", 7, 2, 3, 64),
    Case("EfficientNet, 3 x 3", 3, 2, 1, 32),
    Case("ConvNeXt, patches of 4", 4, 4, 0, 96),
    Case("ViT-Base, patches of 16", 16, 16, 0, 768),
)


class Queued(Call):
    """A call outside of a CUDA graph."""

    captured, rounds = False, True

    @property
    def gpu(self) -> str:
        return torch.cuda.get_device_name()


def node(operator: str, attributes: Mapping[str, Any], kind: torch.dtype) -> Callable[..., torch.Tensor]:
    """A node as a function of tensors that makes one tensor."""
    ours = OPERATORS[operator](dict(attributes))

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        call = Queued(tensors, [kind])
        ours.run(call)  # type: ignore[arg-type]
        return call.made[0]

    return run


def passes(few: Blocks, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> tuple[Callable[[], torch.Tensor], ...]:
    """The forward pass, and the gradient of the weight."""
    image, weight = (node("ChannelsLast", attributes, HALF) for attributes in (few.of_image, few.of_weight))
    convolution = node("Convolution", few.windows, HALF)
    gradient = node("ConvolutionWeightGrad", {**few.windows, **few.of_gradient}, FP32)
    given = image(x)
    return lambda: convolution(image(x), weight(w)), lambda: gradient(dy, given)


def measure(case: Case, batch: int, rounds: int) -> None:
    x = torch.randn(batch, CHANNELS, SIZE, SIZE, device="cuda")
    w = torch.randn(case.outputs, CHANNELS, case.kernel, case.kernel, device="cuda") * 0.1
    last, halves = x.to(HALF, memory_format=torch.channels_last), w.to(HALF, memory_format=torch.channels_last)
    settings: dict[str, Any] = {"stride": case.stride, "padding": case.pad}

    def forward() -> torch.Tensor:
        given = x.to(HALF, memory_format=torch.channels_last)
        return functional.conv2d(given, w.to(HALF, memory_format=torch.channels_last), **settings)

    dy = torch.randn_like(forward())
    pairs = [case.stride] * 2, [case.pad] * 2, [1, 1], False, [0, 0], 1, [False, True, False]

    def backward() -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten.convolution_backward(dy, last, halves, None, *pairs)[1]
        return made.float()

    ours = passes(Blocks.of(CHANNELS, (SIZE, SIZE), case.attributes), x, w, dy.permute(0, 2, 3, 1))
    before = passes(Blocks.of_pixels(CHANNELS, case.attributes), x, w, dy.permute(0, 2, 3, 1))
    agree(case.name, ours[0]().permute(0, 3, 1, 2), forward())
    agree(case.name, ours[1](), backward())
    for what, one, single, peer in zip(("forward", "weight"), ours, before, (forward, backward), strict=True):
        mine, alone, theirs = (time_of([each], rounds) for each in (one, single, peer))
        print(f"{case.name:26} {what:8} {mine:8.1f} us ({alone:8.1f})  PyTorch {theirs / mine:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    Call.compiler = Compiler(torch.cuda.get_device_capability())
    print(f"{torch.cuda.get_device_name()}, bf16, {given.batch} images, PyTorch {torch.__version__}")
    for case in CASES:
        measure(case, given.batch, given.rounds)


if __name__ == "__main__":
    main()
