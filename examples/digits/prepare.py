"""Make what run.yaml reads: the model, and scikit-learn's handwritten digits as images of 32 x 32.

`ortflow run` calls this when build/ is not there yet. The digits come inside the scikit-learn package: 1,797 images of
8 x 8 by 43 writers (Alpaydin & Kaynak 1998); a fixed permutation sets 20% of them aside.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SCALE = 4


def main() -> None:
    """Build the model, convert the images."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        sys.exit("prepare.py: the digits come with scikit-learn; install it with: pip install 'ortflow[digits]'")
    build = HERE / "build"
    subprocess.run([sys.executable, str(HERE / "model.py"), "--output", str(build / "model.onnx")], check=True)
    pixels, labels = load_digits(return_X_y=True)
    images = np.kron(pixels.reshape(-1, 1, 8, 8), np.ones((SCALE, SCALE))) / 16
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "digits.npz"
        np.savez(source, image=images.astype(np.float32), labels=labels.astype(np.int64))
        subprocess.run(
            [sys.executable, "-m", "ortflow", "data", "convert", str(source), "--eval-fraction", "0.2", "--force",
             "--output", str(build / "digits")],
            check=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
