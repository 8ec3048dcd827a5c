"""`render` starts no program that only the run file names."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortflow.cli.app import main

FILE = """
name: small
model: {{path: model.onnx, loss: {{kind: cross_entropy}}}}
data: {{train: {{path: train.arrow}}, micro_batch: 4}}
train: {{steps: 100, optimizer: {{name: adamw, lr: 0.001}}}}
resources: {{ranks_per_node: 2, python: {python}}}
"""


def environment(folder: Path, trace: Path) -> Path:
    """A foreign environment whose programs leave a trace; its interpreter."""
    programs, libraries = folder / "bin", folder / "lib"
    programs.mkdir(parents=True)
    libraries.mkdir()
    (libraries / "libmpi.so.40.1").touch()
    for name in ("python", "mpirun", "mpiexec"):
        (programs / name).write_text(f"#!/bin/sh\n: > {trace}\necho 'Open MPI 5'\n")
        (programs / name).chmod(0o755)
    return programs / "python"


@pytest.mark.parametrize("backend", ["local", "slurm"])
def test_nothing_beside_a_foreign_interpreter_is_started(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, run_file = tmp_path / "started", tmp_path / "run.yaml"
    python = environment(tmp_path / "foreign", trace)
    run_file.write_text(FILE.format(python=python))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "no.conf"))
    arguments = ["render", str(run_file), "--backend", backend, "backends.slurm.mpi=mpirun"]
    assert render(arguments, monkeypatch) == 0
    assert not trace.exists()
    assert str(python.parent / "mpirun") in capsys.readouterr().out
    assert render([*arguments, f"resources.python={python}"], monkeypatch) == 0
    assert trace.exists()


def render(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["ortflow", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
