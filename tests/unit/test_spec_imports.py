"""Reading a run file is fast and needs none of the packages of a rank."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = {"numpy", "onnx", "onnxruntime", "pyarrow", "mpi4py", "safetensors", "tensorboardX", "rich", "typer", "torch"}


def modules_after(code: str) -> set[str]:
    program = f"import sys, json\n{code}\nprint(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_the_run_file_needs_no_package_of_a_rank() -> None:
    imports = "\n".join(
        f"import ortflow.workflow.spec.{name}"
        for name in (
            "file.load",
            "file.dump",
            "checks.check",
            "file.paths",
            "units",
            "file.schema",
            "file.shorthand",
            "file.keys",
            "file.wording",
        )
    )
    assert not modules_after(imports) & HEAVY


def test_the_verbs_import_no_pydantic_until_they_run() -> None:
    found = modules_after("import ortflow.cli.validate, ortflow.cli.schema")
    assert not found & (HEAVY - {"typer", "rich"})
    assert not found & {"pydantic", "yaml"}


def test_importing_takes_little_time() -> None:
    program = (
        "import time, pydantic.main, pydantic.types, yaml; start = time.process_time(); "
        "import ortflow.workflow.spec.file.load; print(time.process_time() - start)"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, cwd="/") for _ in range(2)]
    assert min(float(done.stdout) for done in runs) < 0.4
