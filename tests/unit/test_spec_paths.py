from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from messages import alike, says
from run_files import FULL, SMALL, check_run_file, spec_of
from unprivileged import unprivileged

from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import check_files, resolve_paths, run_directory


def test_each_path_is_relative_to_its_own_folder(tmp_path: Path) -> None:
    file = tmp_path / "jobs" / "run.yaml"
    file.parent.mkdir()
    file.write_text(FULL)
    spec = resolve_paths(load_run_file(file), file, cwd=tmp_path)
    home, root = str(tmp_path / "jobs"), str(tmp_path / "elsewhere")
    assert spec.model.path == f"{home}/model.onnx"
    assert [*spec.model.graphs.model_dump().values()] == [f"{home}/{name}.onnx" for name in "teo"]
    assert (spec.data.train.path, spec.data.eval.path) == (f"{home}/train.arrow", f"{home}/eval.arrow")  # type: ignore[union-attr]
    assert spec.run_dir == root
    assert spec.checkpoint.directory == "/big/disk"
    assert spec.monitor.tensorboard_directory == f"{root}/tb"
    assert spec.export.path == f"{root}/out.onnx"
    assert resolve_paths(spec, Path("/other/run.yaml"), cwd=Path("/other")) == spec


def test_a_run_file_named_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/run.yaml").write_text(SMALL.replace("model.onnx", "../model.onnx"))
    monkeypatch.chdir(tmp_path)
    file = Path("jobs/run.yaml")
    spec = resolve_paths(load_run_file(file), file)
    assert spec.model.path == str(tmp_path / "model.onnx")
    assert spec.data.eval is None
    assert spec.model.graphs.train is None
    assert spec.run_dir == str(tmp_path / "runs" / "small")


def test_a_resolved_run_file_writes_into_the_run_directory_of_an_override(tmp_path: Path) -> None:
    """A copy of a run must not share the checkpoints of the first."""
    old, new, elsewhere = tmp_path / "old", tmp_path / "new", tmp_path / "scratch"
    values = {**yaml.safe_load(SMALL), "run_dir": str(old), "export": {"path": str(old / "export/model.onnx")}}
    values |= {
        "checkpoint": {"directory": str(old / "checkpoints")},
        "monitor": {"tensorboard_directory": str(elsewhere)},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    spec = resolve_paths(load_run_file(file, [f"run_dir={new}"]), file)
    assert spec.checkpoint.directory == str(new / "checkpoints")
    assert spec.export.path == str(new / "export/model.onnx")
    assert spec.monitor.tensorboard_directory == str(elsewhere)
    assert resolve_paths(load_run_file(file), file).checkpoint.directory == str(old / "checkpoints")


def test_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "link.onnx").symlink_to("target.onnx")
    spec = spec_of(model={"path": "link.onnx", "loss": {"kind": "mse"}})
    assert resolve_paths(spec, tmp_path / "run.yaml").model.path == str(tmp_path / "link.onnx")


def test_numbers_in_place_of_a_file_stay(tmp_path: Path) -> None:
    weights = {"kind": "cross_entropy", "class_weights": [1.0, 2.5]}
    spec = spec_of(model={"path": "m.onnx", "loss": weights})
    assert resolve_paths(spec, tmp_path / "run.yaml").model.loss.class_weights == [1.0, 2.5]  # type: ignore[union-attr]
    assert not any("class_weights" in ".".join(map(str, problem.path)) for problem in check_files(spec))


def test_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    spec = spec_of(model={"path": "~/m.onnx", "loss": {"kind": "mse"}}, run_dir="~")
    resolved = resolve_paths(spec, Path("/jobs/run.yaml"))
    assert resolved.model.path == "/home/ada/m.onnx"
    assert resolved.run_dir == "/home/ada"
    assert resolve_paths(spec_of(run_dir="~x"), Path("/jobs/run.yaml"), Path("/now")).run_dir == "/now/~x"


def test_the_run_directory() -> None:
    assert run_directory(spec_of(), Path("/now")) == Path("/now/runs/small")
    assert run_directory(spec_of(run_dir="../x"), Path("/now")) == Path("/x")
    assert run_directory(spec_of(run_dir="/x"), Path("/now")) == Path("/x")


class TestFiles:
    def reported(self, tmp_path: Path, text: str = SMALL, *overrides: str) -> list[str]:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return [str(fault).replace(f"{tmp_path}/", "") for fault in check_run_file(file, overrides)]

    def test_what_is_missing_is_reported_with_its_line(self, tmp_path: Path) -> None:
        fix = "correct the path … `prepare`"
        assert alike(
            self.reported(tmp_path),
            [
                f"run.yaml:3 model.path: … model.onnx … {fix}",
                f"run.yaml:6 data.train.path: … train.arrow … {fix}",
            ],
        )
        assert says(
            self.reported(tmp_path, SMALL, "data.eval=e.arrow")[-1],
            f"on the command line, data.eval.path: … e.arrow … {fix}",
        )

    def test_an_existing_file_is_not_a_fault(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").touch()
        (tmp_path / "train.arrow").mkdir()
        assert self.reported(tmp_path) == []

    def test_what_prepare_makes_is_not_a_fault(self, tmp_path: Path) -> None:
        assert self.reported(tmp_path, SMALL, "prepare=python make.py") == []

    def test_a_model_that_is_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").mkdir()
        (tmp_path / "train.arrow").touch()
        message = "run.yaml:3 model.path: … model.onnx … folder … ONNX file"
        assert alike(self.reported(tmp_path), [message])
        assert alike(self.reported(tmp_path, SMALL, "prepare=python make.py"), [message])

    def test_a_model_that_may_not_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").touch(mode=0)
        (tmp_path / "train.arrow").touch()
        found = unprivileged(lambda: "\n".join(self.reported(tmp_path)))
        assert found == "run.yaml:3 model.path: model.onnx is not readable; change its permissions"

    def test_launchers_with_files_elsewhere_leave_it_out(self, tmp_path: Path) -> None:
        file = tmp_path / "run.yaml"
        file.write_text(SMALL)
        assert check_run_file(file, files=False) == []
        assert len(check_files(resolve_paths(load_run_file(file), file))) == 2
