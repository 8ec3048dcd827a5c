"""Every command of the tutorials that need neither PyTorch nor a cluster, as the pages print it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from project import FEW_CORES, environment
from tutorials import commands, page, run_shell, write_files


def shell_environment() -> dict[str, str]:
    return environment(**FEW_CORES, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", PYTHONWARNINGS="ignore")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder after the tutorial of an .onnx file, and the output of each of its commands."""
    folder = tmp_path_factory.mktemp("only-onnx")
    write_files("only-onnx", folder)
    return folder, {line: run_shell(line, folder, shell_environment()) for line in commands("only-onnx")}


def test_a_run_from_an_onnx_file_alone(trained: tuple[Path, dict[str, str]]) -> None:
    folder, printed = trained
    assert len(printed) == 10
    assert "layer1.weight" in printed["ortflow inspect model.onnx"]
    assert "finished" in printed["ortflow status model"]
    assert (folder / "model.html").is_file()
    *_, name = [text for line, text in printed.items() if line.startswith("python -c")]
    assert name == "x\n"


@pytest.mark.parametrize(("tutorial", "backend"), [("first-slurm-job", "slurm"), ("first-mpijob", "kubernetes")])
def test_commands_before_a_submission(
    trained: tuple[Path, dict[str, str]], tmp_path: Path, tutorial: str, backend: str
) -> None:
    """The commands that need no cluster run; the others are checked on the clusters and by the parser."""
    folder = tmp_path / "project"
    shutil.copytree(trained[0], folder, ignore=shutil.ignore_patterns("runs"))
    (section,) = re.findall(r"```yaml\n(.*?)```", page(tutorial), re.DOTALL)
    with (folder / "model.yaml").open("a") as file:
        file.write(section)
    lines = [line for line in commands(tutorial) if line.startswith(("ortflow validate", "ortflow render"))]
    assert len(lines) == 2
    printed = [run_shell(line, folder, shell_environment()) for line in lines]
    assert ("#SBATCH --nodes=2" if backend == "slurm" else "kind: MPIJob") in printed[1]


def test_quoted_messages_of_onnx_runtime_are_its_own(trained: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    if importlib.util.find_spec("onnxruntime.training") is None:
        with pytest.raises(ModuleNotFoundError) as missing:
            importlib.import_module("onnxruntime.training")
        assert f"ModuleNotFoundError: {missing.value}" in page("only-onnx")
        return
    pytest.importorskip("torch", reason="onnxruntime.training.artifacts imports PyTorch, and it is not installed")
    program = (
        "from onnxruntime.training import artifacts\nimport onnx\n"
        f"artifacts.generate_artifacts(onnx.load({str(trained[0] / 'model.onnx')!r}), requires_grad=['layer1.weight'], "
        f"loss=artifacts.LossType.CrossEntropyLoss, artifact_directory={str(tmp_path)!r})"
    )
    said = run_shell(f'{sys.executable} -c "{program}" 2>&1 || true', tmp_path, shell_environment())
    quoted = "The gradient builder has not been registered: HardSwish for node"
    assert quoted in page("only-onnx")
    assert quoted in said
