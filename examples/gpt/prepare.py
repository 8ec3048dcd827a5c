"""Make what run.yaml reads: the model, and the source of Python's standard library as bytes.

`ortflow run` calls this when build/ is not there yet; options are those of model.py.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
CONTEXT = 128


def main() -> None:
    """Build the model, convert the text."""
    build = HERE / "build"
    subprocess.run(
        [sys.executable, str(HERE / "model.py"), "--output", str(build / "model.onnx"), *sys.argv[1:]], check=True
    )
    library = sysconfig.get_paths()["stdlib"]
    subprocess.run(
        [sys.executable, "-m", "ortflow", "data", "convert", f"{library}/*.py", f"{library}/asyncio/*.py",
         f"{library}/email/*.py", f"{library}/json/*.py", f"{library}/http/*.py", f"{library}/importlib/*.py",
         "--text", "--length", str(CONTEXT), "--eval-fraction", "0.02", "--force", "--output", str(build / "text")],
        check=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
