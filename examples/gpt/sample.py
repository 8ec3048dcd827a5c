"""Write text with the exported model, in plain ONNX Runtime inference.

python sample.py ../../runs/gpt/export/model.onnx --prompt "def " --length 400
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnxruntime


def sample(model: Path, prompt: bytes, length: int, temperature: float, seed: int, context: int = 128) -> bytes:
    """`prompt` and `length` bytes drawn one by one from the model's distribution."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(seed)
    text = bytearray(prompt)
    for _ in range(length):
        tokens = np.frombuffer(bytes(text[-context:]), np.uint8).astype(np.int64)[None]
        (logits,) = session.run(["logits"], {"tokens": tokens})
        scores = logits[0, -1].astype(np.float64) / max(temperature, 1e-6)
        weights = np.exp(scores - scores.max())
        text.append(int(random.choice(len(weights), p=weights / weights.sum())))
    return bytes(text)


def main() -> None:
    """Print a sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", default="\ndef ")
    parser.add_argument("--length", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    text = sample(options.model, options.prompt.encode(), options.length, options.temperature, options.seed)
    print(text.decode("utf-8", errors="replace"))


if __name__ == "__main__":
    main()
