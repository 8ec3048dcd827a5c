"""Two clones and one environment: no test and no command runs on a mixture of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from project import environment

ROOT = Path(__file__).parent.parent.parent
FILES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "tests/conftest.py",
    "tests/support/costs.py",
    "tests/support/forks.py",
)
TEST = "import ortflow.workflow.errors\n\ndef test() -> None:\n    pass\n"
PLAIN_PYTEST = "import sys; del sys.path[0]; import pytest; sys.exit(pytest.main())"
FOLDERS = ("ortflow", "workflow", "launchers", "manifests")


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clones `one`, which is installed in the environment `venv`, and `two`."""
    folder = tmp_path_factory.mktemp("clones")
    for name in ("one", "two"):
        clone = folder / name
        files = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *FOLDERS, *FILES],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split("\0")  # fmt: skip
        for file in filter(None, files):
            if (ROOT / file).exists():
                (clone / file).parent.mkdir(parents=True, exist_ok=True)
                (clone / file).write_bytes((ROOT / file).read_bytes())
        (clone / "tests" / "support").mkdir(exist_ok=True)
        (clone / "tests" / "test_import.py").write_text(TEST)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    # Everything that is installed here, except ortflow, which would be this checkout's.
    installed = [path for folder in map(Path, sys.path) if folder.name == "site-packages" for path in folder.iterdir()]
    for path in installed:
        if "ortflow" not in path.name.lower() and not path.name.endswith(".pth") and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    install = ["--no-build-isolation", "--no-deps", "-q", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "--python", str(folder / "venv/bin/python"), "install", *install]
    subprocess.run([*command, "-e", str(folder / "one")], check=True, timeout=250)
    return folder


def run(clones: Path, name: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(clones / "venv/bin/python"), *arguments], cwd=clones / name, env=environment(**changes),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


IMPORT = ("-c", "import ortflow.workflow.errors, ortflow.launchers; print(ortflow.__file__, ortflow.workflow.__file__)")


def test_the_installed_clone_works_from_every_folder(clones: Path) -> None:
    for folder in ("one", "venv"):
        done = run(clones, folder, *IMPORT)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(clones / f"one/{name}/__init__.py") for name in ("ortflow", "workflow")]
    assert run(clones, "two", "-P", *IMPORT).returncode == 0 or sys.version_info < (3, 11)
    done = run(clones, "one", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_import.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mixture_is_refused_in_one_sentence(clones: Path) -> None:
    for arguments in (IMPORT, ("-m", "ortflow", "--help")):
        done = run(clones, "two", *arguments)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError: ortflow is imported from ")
        assert f"{clones / 'two'}, and ortflow.workflow from {clones / 'one'}" in last


@pytest.mark.parametrize("arguments", [["-m", "pytest"], ["-c", PLAIN_PYTEST]], ids=["python -m pytest", "pytest"])
def test_no_test_runs_on_another_clone(clones: Path, arguments: list[str]) -> None:
    done = run(clones, "two", *arguments, "-q", "-p", "no:cacheprovider", "tests/test_import.py")
    assert done.returncode == 4, done.stdout
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(errors) == 1, done.stderr
    assert str(clones / "one") in errors[0]
    assert "pip install -e ." in errors[0]


def test_a_wheel_s_layout_is_taken_beside_an_editable_install(clones: Path, tmp_path: Path) -> None:
    """As it is copied to a login node, where another ortflow may be installed; and from a zip."""
    package = tmp_path / "ortflow"
    for name, target in (("ortflow", package), *((one, package / one) for one in FOLDERS[1:])):
        for path in (clones / "two" / name).rglob("*.py"):
            place = target / path.relative_to(clones / "two" / name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    done = run(clones, "venv", *IMPORT, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(package / "__init__.py"), str(package / "workflow" / "__init__.py")]
    subprocess.run([sys.executable, "-m", "zipfile", "-c", "code.zip", "ortflow"], cwd=tmp_path, check=True)
    done = run(clones, "venv", *IMPORT, PYTHONPATH=str(tmp_path / "code.zip"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "code.zip"))
