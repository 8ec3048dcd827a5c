"""A launcher from a package that is installed beside ortflow, with its own options: every verb supports it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from documentation import writer_of
from launching import Bench
from messages import alike, mentions, says
from project import command
from run_files import SMALL, reported
from waits import PATIENCE

from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.run import TrainerRunSpec

PACKAGE = Path(__file__).parent.parent / "launchers" / "spool"
SECTION = "backends: {spool: {queue: short, limit: 90, wrapper: env A=1, mail: me@here}}\n"


@dataclass(frozen=True)
class Site:
    """A folder with a run whose rank trains nothing, and the package installed beside ortflow."""

    folder: Path
    packages: Path

    def write(self, name: str, **options: Any) -> None:
        # For `validate`, `prepare` makes the model; nothing here opens it.
        Bench.make(self.folder).write(
            1, name=name, prepare="true", backends={"spool": {"queue": "short", "wrapper": "env A=1", **options}}
        )
        (self.folder / "model.onnx").unlink()

    def ortflow(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return command(*arguments, folder=self.folder, PYTHONPATH=str(self.packages), **variables)

    def wait(self, name: str, state: str) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while (how := json.loads(self.ortflow("status", name, "--json").stdout))["state"] != state:
            assert time.monotonic() < end, how
        return dict(how)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spool")
    shutil.copytree(PACKAGE, folder / "source")
    install = ["install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "packages")]
    subprocess.run([sys.executable, "-m", "pip", *install, str(folder / "source")], check=True)
    return folder / "packages"


@pytest.fixture
def site(tmp_path: Path, packages: Path) -> Site:
    return Site(tmp_path, packages)


@pytest.fixture
def installed(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(packages)


def test_a_run_goes_through_every_verb(site: Site) -> None:
    site.write("one")
    validated = site.ortflow("validate", "run.yaml", "-b", "spool")
    assert validated.returncode == 0, validated.stderr
    examined = site.ortflow("doctor", "run.yaml", "-b", "spool")
    assert examined.returncode == 0, examined.stderr
    assert "ok        queue: short takes jobs" in examined.stdout
    rendered = site.ortflow("render", "run.yaml", "-b", "spool", "backends.spool.priority=7")
    assert rendered.stdout.startswith("# queue short, priority 7\nenv A=1 ")
    submitted = site.ortflow("submit", "run.yaml", "-b", "spool")
    assert submitted.returncode == 0, submitted.stderr
    assert submitted.stdout.startswith("spool://")
    assert site.wait("one", "finished")["launcher"] == "spool"
    assert "rank 0 of 1 begins attempt 0" in site.ortflow("logs", "one").stdout
    listed = json.loads(site.ortflow("list", "-b", "spool", "--json").stdout)
    assert [how["name"] for how in listed] == ["one"]
    assert json.loads(site.ortflow("list", "-b", "local", "--json").stdout) == []


def test_a_run_is_cancelled_and_resumed(site: Site) -> None:
    site.write("two")
    submitted = site.ortflow("submit", "run.yaml", "-b", "spool", FAKE_STEPS="100000")
    assert submitted.returncode == 0, submitted.stderr
    site.wait("two", "running")
    cancelled = site.ortflow("cancel", "two")
    assert cancelled.returncode == 0, cancelled.stderr
    site.wait("two", "cancelled")
    resumed = site.ortflow("resume", "two", FAKE_STEPS="1")
    assert resumed.returncode == 0, resumed.stderr
    assert site.wait("two", "finished")["attempts"] == 2


def test_unsupported_verbs_are_refused_with_an_alternative(site: Site) -> None:
    site.write("three", queue="middle")
    for arguments, output in (
        (("validate", "run.yaml"), "backends.spool.queue: there is no queue middle; use short or long"),
        (("submit", "run.yaml", "-b", "spool", "--set", "seed=1,2"), "the launcher spool has none; add -b slurm"),
        (("doctor", "-b", "spool", "--job"), "are not supported by the launcher spool; add -b slurm"),
    ):
        done = site.ortflow(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert output in done.stderr
    assert mentions(site.ortflow("doctor", "run.yaml", "-b", "spool").stdout, "fault     queue: … middle")


def test_a_missing_package_is_reported_in_one_sentence(site: Site) -> None:
    site.write("four")
    done = command("validate", "run.yaml", folder=site.folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert mentions(done.stderr, "backends.spool: … no launcher … local, slurm, kubernetes")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("section", "faults"),
    [
        ("{queue: short, limit: 90, wrapper: env A=1, mail: me@here}", []),
        ("{limit: 90}", ["run.yaml:13 backends.spool.queue: is missing … queue that takes the job"]),
        ("{queue: short, priorty: 1}", ["run.yaml:13 backends.spool.priorty: unknown key … priority?"]),
        ("{queue: short, priority: 12}", ["run.yaml:13 backends.spool.priority: … at most 9 … 12"]),
        ("{queue: short, mail: {too: me}}", ["run.yaml:13 backends.spool.mail.too: unknown key … to?"]),
    ],
)
def test_options_are_typed(tmp_path: Path, section: str, faults: list[str]) -> None:
    assert alike(reported(tmp_path, f"{SMALL}backends: {{spool: {section}}}\n"), faults)


@pytest.mark.usefixtures("installed")
def test_options_agree_with_the_rest_of_the_run(tmp_path: Path) -> None:
    text = SMALL + "backends: {spool: {queue: short}}\n"
    (fault,) = reported(tmp_path, text, "resources.ranks_per_node=2")
    assert says(fault, "run.yaml:13 backends.spool: … one rank … 2")
    (unknown,) = reported(tmp_path, text.replace("spool:", "spol:"))
    assert says(unknown, "run.yaml:13 backends.spol: unknown key … spool?")


@pytest.mark.usefixtures("installed")
def test_a_rank_reads_the_run_without_the_section(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SMALL + SECTION)
    spec = load_run_file(tmp_path / "run.yaml")
    options = spec.backends.spool  # type: ignore[attr-defined]
    assert (options.queue, options.limit, options.wrapper, options.mail.to) == (
        "short",
        "90",
        ["env", "A=1"],
        "me@here",
    )
    assert type(load_run_file(tmp_path / "run.yaml", others=False)) is TrainerRunSpec


def test_schema_and_tables_have_the_options(site: Site) -> None:
    schema = json.loads(site.ortflow("schema").stdout)
    backends = schema["$defs"]["Backends"]["properties"]
    assert backends["spool"]["description"] == "Options of the spool."
    options = schema["$defs"]["SpoolOptions"]
    assert options["required"] == ["queue"]
    assert options["properties"]["queue"]["description"] == "Queue that takes the job."
    assert {"type": "integer", "exclusiveMinimum": 0} in options["properties"]["limit"]["anyOf"]


@pytest.mark.usefixtures("installed")
def test_the_tables_of_the_documentation_can_be_written_for_it() -> None:
    tables = writer_of("run_file_tables").launcher_tables("spool")
    assert "### `backends.spool`" in tables
    assert "| `queue` | text | required | Queue that takes the job. |" in tables
    assert "### `backends.spool.mail`" in tables


def test_a_package_that_cannot_be_loaded_is_named(site: Site, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(site.packages, broken)
    (broken / "ortflow_spool" / "options.py").write_text("import nowhere\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**yaml.safe_load(SMALL), "backends": {"spool": {}}}))
    done = command("validate", "run.yaml", folder=tmp_path, PYTHONPATH=os.fspath(broken))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert mentions(done.stderr, "backends.spool", "ortflow_spool.options:SpoolOptions")
