"""What `.ci/run` decides: which part of a list runs, which tests a change reaches, which failures may be run again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from program_files import module_of

ROOT = Path(__file__).resolve().parent.parent.parent
CI = ROOT / ".ci"


def load(name: str, path: Path | None = None) -> ModuleType:
    return module_of(path or CI / f"{name}.py")


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    sys.path.insert(0, str(CI))
    yield
    sys.path.remove(str(CI))


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=n", "-c", "user.email=e@e.example")
    return subprocess.run(["git", *named, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / ".ci").mkdir()
    shutil.copy(CI / "tree", tmp_path / ".ci" / "tree")
    (tmp_path / ".gitignore").write_text("/build/\n")
    (tmp_path / "a.py").write_text("1\n")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def tree(checkout: Path) -> str:
    return subprocess.run([checkout / ".ci/tree"], check=True, capture_output=True, text=True).stdout.strip()


def test_the_hash_depends_on_the_files_alone(checkout: Path) -> None:
    before = tree(checkout)
    assert before == git(checkout, "rev-parse", "HEAD^{tree}").strip()
    git(checkout, "commit", "-qm", "nothing", "--allow-empty")
    (checkout / "build").mkdir()
    (checkout / "build" / "log").write_text("ignored by git")
    assert tree(checkout) == before
    (checkout / "b.py").write_text("2\n")
    changed = tree(checkout)
    assert changed != before, "a file that is not committed counts"
    assert git(checkout, "diff", "--cached", "--name-only") == "", "the index stays"
    git(checkout, "add", "b.py")
    git(checkout, "commit", "-qm", "second")
    assert tree(checkout) == changed


def test_the_nearest_tests_come_first() -> None:
    reach = load("reach")
    importers = {"low": {"middle"}, "middle": {"high", "test_middle"}, "high": {"test_high"}, "other": {"test_other"}}
    assert reach.distances(["low"], importers) == {"low": 0, "middle": 1, "high": 2, "test_middle": 2, "test_high": 3}
    tests = [(3, Path("test_high.py")), (2, Path("test_slow.py")), (2, Path("test_middle.py"))]
    durations = {"test_middle.py": 1.0, "test_slow.py": 5.0, "test_high.py": 100.0}
    assert reach.within(tests, 10.0, durations) == [Path("test_middle.py"), Path("test_slow.py")]
    assert reach.within(tests, 5.5, durations) == [Path("test_middle.py")]


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("workflow/checkpoint/__init__.py", "ortflow.workflow.checkpoint"),
        ("workflow/kernels/gelu.c", "ortflow.workflow.kernels"),
        ("ortflow/__init__.py", "ortflow"),
        ("launchers/stop.py", "ortflow.launchers.stop"),
        ("tests/support/project.py", "project"),
    ],
)
def test_a_file_is_a_module(path: str, module: str) -> None:
    assert load("reach").module_of(Path(path)) == module


def test_a_test_is_reached_through_its_imports_and_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    reach = load("reach")
    product = {"ortflow.launchers.budget": {"ortflow.launchers.supervision.supervisor"}}
    monkeypatch.setattr(reach, "product_importers", lambda: product)
    importers = reach.importers_of_all()
    reached = {path.name: steps for steps, path in reach.nearest_tests([Path("launchers/budget.py")], importers)}
    assert reached["test_launcher_budget.py"] == 1
    assert "test_data_order.py" not in reached
    pages = {path.name for _, path in reach.nearest_tests([Path("docs/architecture.md")], importers)}
    assert "test_architecture_page.py" in pages
    assert "test_data_order.py" not in pages


FAILING = """
import pathlib, pytest
seen = pathlib.Path(__file__).with_name("seen")

def test_unlucky():
    assert seen.exists() or seen.touch(), "the node did not come up within 5 s"

def test_broken():
    assert 12.5 < 5.0, "seconds until the job started"

def test_number():
    losses = [1.25, 2.5]
    assert losses == [1.25, 2.75]

def test_orphan():
    leftovers = ["ortflow.workflow.rank"]
    assert leftovers == []

def test_traceback():
    assert not "Traceback (most recent call last):\\n  File x", "output"

@pytest.fixture
def cluster():
    raise RuntimeError("no cluster")

def test_setup(cluster): pass
def test_right(): pass
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a failing file of a cluster and of units, and the report of a first run of both."""
    folder = tmp_path_factory.mktemp("checkout")
    for room in ("tests/slurm", "tests/unit"):
        (folder / room).mkdir(parents=True)
        (folder / room / "test_failing.py").write_text(FAILING)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers = chaos\n")
    subprocess.run([*PYTEST, "--report-log=first.jsonl"], cwd=folder, check=False, capture_output=True)
    return folder


OTHERS = ("cacheprovider", "xdist", "xdist.looponfail", "anyio", "hypothesispytest")
PYTEST = [sys.executable, "-m", "pytest", "-q", *(word for name in OTHERS for word in ("-p", f"no:{name}"))]


class Lanes:
    """The lanes of a run of `.ci/run`, one of which had failures."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.script = folder, load("once_more")
        monkeypatch.setattr(self.script, "ROOT", folder)
        monkeypatch.setattr(self.script, "PAGE", folder / "tests/unstable.md")
        self.write_page(0)
        for room in ("tests/slurm", "tests/unit"):
            (folder / room / "seen").touch()
        shutil.rmtree(folder / "unstable", ignore_errors=True)

    def write_page(self, rows: int, test: str = "tests/slurm/test_failing.py::test_number") -> None:
        self.script.PAGE.write_text(page_with(rows, test))

    def ended(self, *tests: str) -> Path:
        """The lane in which these tests failed."""
        lane = self.folder / "reports" / "slurm"
        self.script.record(lane, PYTEST)
        lines = [line for line in (self.folder / "first.jsonl").read_text().splitlines() if mentions(line, tests)]
        assert len(lines) >= len(tests)
        lane.with_suffix(".jsonl").write_text("\n".join(lines))
        return lane

    def run_again(self) -> int:
        return int(self.script.run_again(self.folder / "reports", self.folder / "unstable"))


def mentions(line: str, tests: tuple[str, ...]) -> bool:
    return json.loads(line).get("nodeid") in {f"tests/{test}" for test in tests}


@pytest.fixture
def lanes(failing: Path, monkeypatch: pytest.MonkeyPatch) -> Lanes:
    return Lanes(failing, monkeypatch)


def test_an_unlucky_test_passes_alone_and_is_named(lanes: Lanes, capsys: pytest.CaptureFixture[str]) -> None:
    test = "slurm/test_failing.py::test_unlucky"
    assert lanes.script.may_wait(lanes.ended(test, "slurm/test_failing.py::test_right"))
    assert capsys.readouterr().out == ""
    assert lanes.run_again() == 0
    output = capsys.readouterr().out
    assert output.count("unstable:") == 1
    assert f"tests/{test} failed once and passed 2 times alone; add it to tests/unstable.md" in output
    (log,) = (lanes.folder / "unstable").iterdir()
    assert "did not come up" in log.read_text(), "the first failure's output"


def test_a_test_that_fails_again_fails_the_run(lanes: Lanes, capsys: pytest.CaptureFixture[str]) -> None:
    assert lanes.script.may_wait(lanes.ended("slurm/test_failing.py::test_broken", "slurm/test_failing.py::test_setup"))
    assert lanes.run_again() == 1
    assert capsys.readouterr().out.count("failed again alone") == 2, "both are named"


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("slurm/test_failing.py::test_number", "a wrong number"),
        ("slurm/test_failing.py::test_orphan", "a process or memory that stays"),
        ("slurm/test_failing.py::test_traceback", "a traceback of the product"),
        ("unit/test_failing.py::test_unlucky", "no cluster"),
    ],
)
def test_some_failures_count_at_once(lanes: Lanes, test: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not lanes.script.may_wait(lanes.ended(test, "slurm/test_failing.py::test_unlucky"))
    output = capsys.readouterr().out
    assert f"tests/{test}: {reason}" in output
    assert "slurm/test_failing.py::test_unlucky" not in output
    assert lanes.run_again() == 0, "the lane has failed already: nothing of it is run again"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("file", "reason"),
    [("test_program_frameworks.py", None), ("test_export_layouts.py", None), ("test_losses.py", "no cluster")],
)
def test_whole_runs_against_pytorch_may_be_unlucky(file: str, reason: str | None) -> None:
    failure = load("once_more").Failure("frameworks", f"tests/torch/{file}::test_it", "E  TimeoutError: no answer")
    assert (failure.reason_not_to_repeat or "").startswith(reason or "") is True
    assert (failure.reason_not_to_repeat is None) == (reason is None)


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ("E  AssertionError: nothing is said\nE    step 3 loss 5.3\nE  assert None", None),
        ("E  AssertionError: nothing is said\nE    step 3\nE  assert losses == [5.3]", "a wrong number"),
        ("E  AssertionError: another loss\nE    step 3\nE  assert None", "a wrong number"),
        (">  assert same(gradients)\nE  AssertionError", "a wrong number"),
    ],
)
def test_what_a_failed_test_prints_of_a_run_is_no_reason(shown: str, reason: str | None) -> None:
    failure = load("once_more").Failure("slurm", "tests/slurm/test_it.py::test_it", f"def test_it():\n{shown}\n")
    assert failure.reason_not_to_repeat == reason


def page_with(rows: int, test: str = "tests/unit/test_ci.py::test_a_file_is_a_module[x]") -> str:
    head = "".join(line for line in (ROOT / "tests/unstable.md").read_text().splitlines(True) if "`tests/" not in line)
    return head + "".join(f"| `{test}` | 2026-11-28 | none known |\n" for _ in range(rows))


def test_the_page_has_at_most_five_lines(lanes: Lanes, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(lanes.script.listed_tests(page_with(5))) == 5
    with pytest.raises(ValueError, match="at most 5"):
        lanes.script.listed_tests(page_with(6))
    with pytest.raises(ValueError, match="suspected cause"):
        lanes.script.listed_tests(page_with(0) + "| tests/unit/test_ci.py::test_x | lately | |\n")
    lanes.script.PAGE.write_text(
        page_with(0) + "".join(f"| `tests/slurm/test_failing.py::test_{n}` | 2026-11-28 | x |\n" for n in range(5))
    )
    with pytest.raises(ValueError, match="there is no test"):
        lanes.script.check_page()
    lanes.ended("slurm/test_failing.py::test_unlucky")
    assert lanes.run_again() == 1, "the sixth"
    assert "more than 5" in capsys.readouterr().out


def test_the_page_of_this_checkout_is_right() -> None:
    load("once_more").check_page()


def test_seconds_are_added_up_by_file(lanes: Lanes) -> None:
    seconds = load("reports").seconds_by_file(lanes.ended("slurm/test_failing.py::test_right").parent)
    assert list(seconds) == ["tests/slurm/test_failing.py"]
    assert 0 < seconds["tests/slurm/test_failing.py"] < 50


def test_a_patrol_goes_on_with_what_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patrol = load("patrol", ROOT / "tools" / "patrol")
    script = (
        "import os, pathlib, sys; print('part', os.environ['ORTFLOW_PART']); sys.exit(not pathlib.Path('{}').exists())"
    )
    repaired = tmp_path / "repaired"
    broken = script.format(repaired)
    lists = {
        "sound": patrol.CaseList(
            ("launchers",), patrol.parts("sound", 2, (sys.executable, "-c", script.format(tmp_path)))
        ),
        "broken": patrol.CaseList(("workflow",), patrol.parts("broken", 1, (sys.executable, "-c", broken))),
    }
    monkeypatch.setattr(patrol, "LISTS", lists)
    monkeypatch.setattr(patrol, "FOLDER", tmp_path / "patrol")
    monkeypatch.setattr(patrol, "tree", lambda: "0" * 40)
    monkeypatch.setattr(sys, "argv", ["patrol"])
    assert patrol.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["passed", "sound-0"],
        ["passed", "sound-1"],
        ["FAILED", "broken-0"],
    ]
    assert "part 1/2" in lines[1], "each piece has its part"
    repaired.touch()
    assert patrol.main() == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["passed", "broken-0"]]
    monkeypatch.setattr(patrol, "tree", lambda: "1" * 40)
    monkeypatch.setattr(sys, "argv", ["patrol", "sound", "--hours", "-1"])
    assert patrol.main() == 0
    assert "next call goes on" in capsys.readouterr().out, "other files: nothing has passed yet"


def test_a_patrol_of_what_is_touched_needs_a_commit() -> None:
    patrol = load("patrol", ROOT / "tools" / "patrol")
    with pytest.raises(SystemExit, match="no commit nowhere here; name another: --touched BASE"):
        patrol.touched("nowhere")
    assert set(patrol.touched("HEAD")) <= set(patrol.LISTS)


def test_a_patrol_has_every_rotating_and_every_chaos_test_of_the_clusters() -> None:
    patrol = load("patrol", ROOT / "tools" / "patrol")
    for cluster in ("slurm", "kubernetes"):
        named = {word for piece in patrol.LISTS[cluster].pieces for word in piece.command if word.endswith(".py")}
        marked = {
            str(path.relative_to(ROOT))
            for path in (ROOT / "tests" / cluster).glob("test_*.py")
            if "mark.chaos" in path.read_text() or "mark.rotates" in path.read_text()
        }
        assert named == marked


def test_a_patrol_has_every_test_file_with_cases_that_rotate() -> None:
    """`rotates` leaves cases out of a run; each file that has it is named by a piece, or lies in a folder of one."""
    patrol = load("patrol", ROOT / "tools" / "patrol")
    words = {word for listed in patrol.LISTS.values() for piece in listed.pieces for word in piece.command}
    files = {path.relative_to(ROOT) for path in ROOT.glob("tests/*/test_*.py") if "mark.rotates" in path.read_text()}
    assert {path.parent.name for path in files} >= {"unit", "integration", "chaos", "torch", "slurm", "kubernetes"}
    assert [str(path) for path in sorted(files) if not {str(path), str(path.parent)} & words] == []


def test_the_table_has_each_stage_of_each_lane(tmp_path: Path) -> None:
    """Two lanes: one stage of the first lasts as long as two of the second."""
    script = (
        f"set -euo pipefail; work={tmp_path}; source {CI}/lib/lanes.sh; SECONDS=30\n"
        "kinds() { say two; for number in 1 2 3; do /bin/true; done; sleep 1.1; say three; sleep 1.1; }\n"
        "say one; beside kinds kinds; await kinds; note end\n"
    )
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    assert "=== one (3" in done.stdout
    assert "=== three (3" in done.stdout
    minutes = load("minutes")
    lines = minutes.table(minutes.read_marks((tmp_path / "stages").read_text()))
    lines = [line for line in lines if not line.endswith("lane kinds")]  # it may last a second until its first stage
    assert [line.split()[-1] for line in lines] == ["stage", "one", "two", "three"]
    _, spent, _, started, _ = lines[1].split()
    assert spent in {"0.0", "0.1"}
    assert int(started) >= int(lines[2].split()[3]) + int(lines[3].split()[3]) >= 5


def run_lanes(work: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run shell text with the functions of .ci/run's lanes."""
    text = f"set -euo pipefail; work={work}; source {CI}/lib/lanes.sh\n{script}"
    return subprocess.run(["bash", "-c", text], check=False, capture_output=True, text=True)


def test_lanes_go_on_beside_a_failure_and_all_failures_are_listed(tmp_path: Path) -> None:
    """Each lane fails at its first failing command; what does not depend on it runs to its end."""
    done = run_lanes(
        tmp_path,
        "two_parts() { attempt first part 3; attempt second part 0; }\n"
        "part() { echo begun; (exit $1); echo unreached $1; }\n"
        "long() { sleep 1; echo long has ended; }\n"
        "beside wrong part 4; beside parts two_parts; beside long long; beside torch part 5\n"
        "attempt here part 6\n"
        "if await torch; then echo unreached 5; fi\n"
        "await wrong parts long || echo one of them failed\n"
        "echo the end\n",
    )
    assert done.returncode == 0, done.stderr
    assert "unreached 0" in done.stdout
    assert not [number for number in (3, 4, 5, 6) if f"unreached {number}" in done.stdout]
    assert "long has ended" in done.stdout
    assert done.stdout.endswith("one of them failed\nthe end\n")
    assert sorted((tmp_path / "failed").read_text().split()) == ["first", "here", "torch", "wrong"]


def test_what_lanes_and_attempts_spend_is_recorded(tmp_path: Path) -> None:
    """With all that they waited for, also where they fail; a lane's includes its attempts'."""
    busy = f"{sys.executable} -c 'import time\nwhile time.process_time() < {{}}: pass'"
    two = f"two() {{ attempt part {busy.format(0.35)}; {busy.format(0.35)}; }}\n"
    done = run_lanes(tmp_path, f"{two}beside both two\nattempt none false\nawait both\n")
    assert done.returncode == 0, done.stderr
    lines = load("minutes").processor_table((tmp_path / "spent").read_text(), os.sysconf("SC_CLK_TCK"))
    assert [line.split() for line in lines[1:]] == [["1", "lane", "both"], ["0", "part"], ["0", "none"]]


def test_what_must_have_passed_ends_all(tmp_path: Path) -> None:
    done = run_lanes(tmp_path, "beside packages false; await packages || exit 1; echo unreached\n")
    assert done.returncode == 1
    assert "FAILED: packages" in done.stdout
    assert "unreached" not in done.stdout


def test_the_table_counts_what_the_machine_did() -> None:
    minutes = load("minutes")
    text = (
        "7\t0\tcpu  100 0 50 1000 0 0 0 0 0 0\tprocesses 500\tfirst\n"
        "8\t0\tcpu  100 0 50 1000 0 0 0 0 0 0\tprocesses 500\tbeside\n"
        "7\t90\tcpu  250 0 50 1040 10 0 0 0 0 0\tprocesses 750\tsecond\n"
        "7\t120\tcpu  250 0 50 1140 10 0 0 0 0 0\tprocesses 750\tend\n"
        "8\t180\tcpu  350 0 50 1240 10 0 0 0 0 0\tprocesses 1000\tend\n"
    )
    assert [line.split() for line in minutes.table(minutes.read_marks(text))[1:]] == [
        ["0", "1.5", "25%", "250", "first"],
        ["0", "3.0", "50%", "500", "beside"],
        ["90", "0.5", "100%", "0", "second"],
    ]


def test_tests_are_counted_by_lane(tmp_path: Path) -> None:
    reports = load("reports")
    spent = [("a", "setup", 2.0, "passed"), ("a", "call", 1.0, "failed"), ("b", "setup", 0.1, "skipped")]
    for lane, times in (("unit", 1), ("slurm", 10)):
        lines = [
            {"$report_type": "TestReport", "nodeid": f"{lane}::{test}", "duration": times * seconds, "outcome": outcome,
             "user_properties": [["processor seconds", 0.5 / times]] if test == "a" else []}
            for test, _, seconds, outcome in spent
        ]  # fmt: skip
        (tmp_path / f"{lane}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    lines = list(reports.figures(reports.tests_by_lane(tmp_path), reports.processor_seconds(tmp_path)))
    assert [line.split() for line in lines if "most" not in line] == [
        ["tests", "seconds", "processor", "lane"], ["1", "30", "0", "slurm"], ["1", "3", "1", "unit"],
        [], ["30.0", "slurm::a"], ["3.0", "unit::a"], [], ["1.0", "unit::a"], ["0.1", "slurm::a"],
    ]  # fmt: skip


def test_compiled_modules_are_kept_by_content(tmp_path: Path) -> None:
    """A clone elsewhere, with other times, is compiled with what another one has compiled; a changed file is not."""
    bytecode, store = load("bytecode"), tmp_path / "store"
    texts = {"test_a.py": "def test_a() -> None:\n    assert {1} == {1}\n", "b.py": "B = 1\n"}
    for turn, name in enumerate(("first", "second")):
        clone, prefix = tmp_path / name, tmp_path / f"{name}-pycache"
        clone.mkdir()
        git(clone, "init", "-q")
        for number, (file, text) in enumerate(texts.items()):
            (clone / file).write_text(text)
            os.utime(clone / file, (1000 + number, 1000 + number + turn))
        if name == "second":
            (clone / "changed.py").write_text("C = 1\n")
            assert bytecode.bring(clone, prefix, store) == 2
        before = {path: path.stat().st_mtime_ns for path in prefix.rglob("*.pyc")}
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(prefix)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        done = subprocess.run(
            [*PYTEST, "-c", "/dev/null", "--rootdir", str(clone), "test_a.py"],
            cwd=clone, env=environment, check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        subprocess.run([sys.executable, "-c", "import b"], cwd=clone, env=environment, check=True, capture_output=True)
        if name == "first":
            assert bytecode.keep(clone, prefix, store) == 2
            (clone / "b.py").write_text("B = 22\n")
            assert bytecode.keep(clone, prefix, store) == 0, "it was compiled from another content"
        else:
            assert len(before) == 2
            assert before == {path: path.stat().st_mtime_ns for path in before}, "nothing is compiled again"


def test_environments_used_longest_ago_are_deleted_over_the_limit(tmp_path: Path) -> None:
    """With their compiled modules; what a run that is under way copies stays, of a killed one it goes."""
    cached = tmp_path / "ci" / "environments"
    names = ("last", "last.77", "earlier", "earlier.bytecode", "oldest", "oldest.bytecode", "killed.88")
    for age, name in enumerate(names):
        (cached / name).mkdir(parents=True)
        (cached / name / "package").write_bytes(bytes(1_100_000))
        hours = 25 if name == "killed.88" else age
        os.utime(cached / name, (time.time() - 3600 * hours,) * 2)
    for limit, remaining in ((99, {"last", "earlier", "oldest"}), (7, {"last", "earlier"}), (3, {"last"})):
        text = f"set -euo pipefail; source {CI}/lib/environments.sh; environments_limit={limit}; prune_environments"
        subprocess.run(["bash", "-c", text], check=True, env={**os.environ, "ORTFLOW_CACHE": str(tmp_path)})
        compiled = {f"{name}.bytecode" for name in remaining - {"last"}}
        assert {path.name for path in cached.iterdir()} == {"last.77", *remaining, *compiled}


def test_the_longest_files_come_first(tmp_path: Path) -> None:
    """Behind the choice of cases that rotate, which is the same with and without recorded durations."""
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text("def test_1(): pass\ndef test_2(): pass\n")
    (tmp_path / "conftest.py").write_text("from rotation import rotate\npytest_collection_modifyitems = rotate\n")
    (tmp_path / "test_a.py").write_text(
        "import pytest\n@pytest.mark.rotates\n@pytest.mark.parametrize('n', [1, 2])\ndef test(n): pass\n"
    )
    (tmp_path / "durations.json").write_text(json.dumps({"test_a.py": 1.0, "test_c.py": 9.0}))

    def listed(**changes: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support"), "ORTFLOW_CASES": "1/2", **changes}
        command = [*PYTEST, "-c", "/dev/null", "--rootdir", str(tmp_path), "--collect-only", str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
        return [line.removeprefix("test_") for line in done.stdout.splitlines() if "::" in line]

    assert listed(ORTFLOW_DURATIONS="") == [
        "a.py::test[2]",
        "b.py::test_1",
        "b.py::test_2",
        "c.py::test_1",
        "c.py::test_2",
    ]
    assert listed(ORTFLOW_DURATIONS=str(tmp_path / "durations.json")) == [
        "c.py::test_1", "c.py::test_2", "b.py::test_1", "b.py::test_2", "a.py::test[2]",
    ]  # fmt: skip


def test_processes_are_counted_by_unit_test_file(tmp_path: Path) -> None:
    """With those of fixtures. Files that start none are counted."""
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (tmp_path / "conftest.py").write_text("from costs import pytest_runtest_makereport\n")
    (folder / "test_alone.py").write_text("def test_1(): pass\n")
    (folder / "test_starting.py").write_text(
        "import os, subprocess, pytest\n"
        "@pytest.fixture(scope='module')\n"
        "def started(): subprocess.run(['true'], check=True)\n"
        "def test_1(started): os.system('true')\n"
        "def test_2(started): subprocess.run(['true'], check=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support")}
    command = [*PYTEST, "-c", "/dev/null", "--rootdir", str(tmp_path), "--report-log=unit.jsonl", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    reports = load("reports")
    assert reports.processor_seconds(tmp_path)["unit"]["tests/unit/test_starting.py::test_1"] > 0
    assert list(reports.starting(reports.processes_by_unit_file(tmp_path))) == [
        "1 of 2 unit test files started 3 processes",
        "       3  tests/unit/test_starting.py",
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_an_environment_is_that_of_the_extras_that_it_has() -> None:
    """Another extra's requirements are not asked for: a new one would have every environment installed again."""
    of = load("requirements").requirements
    project = {"dependencies": ["a"], "optional-dependencies": {"x": ["b", "c>=1"], "y": ["d"], "z": ["e"]}}
    assert of(["/dist/ortflow-0.1.0-py3-none-any.whl[x,z]", "pytest"], project) == ["a", "b", "c>=1", "e"]
    assert of(["/dist/ortflow-0.1.0-py3-none-any.whl", "pytest"], project) == ["a"]
    assert of(["pytest"], project) == []
    with pytest.raises(KeyError):
        of(["/dist/ortflow-0.1.0-py3-none-any.whl[w]"], project)


def test_a_command_has_shared_memory_of_its_own(tmp_path: Path) -> None:
    own = [str(CI / "own_memory"), "sh", "-c", "ls /dev/shm; touch /dev/shm/$0; exit 3", tmp_path.name]
    if subprocess.run([CI / "own_memory", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs root")
    before = Path("/dev/shm") / f"{tmp_path.name}-before"
    before.touch()
    try:
        done = subprocess.run(own, check=False, capture_output=True, text=True)
    finally:
        before.unlink()
    assert (done.returncode, done.stdout) == (3, "")
    assert not (Path("/dev/shm") / tmp_path.name).exists()


def test_files_of_tests_against_pytorch_are_skipped_without_it() -> None:
    for path in (ROOT / "tests" / "torch").glob("test_*.py"):
        lines = path.read_text().splitlines()
        skip = next((number for number, line in enumerate(lines, 1) if "importorskip" in line), len(lines))
        imports = [number for number, line in enumerate(lines, 1) if re.match(r"(import|from) torch\b", line)]
        assert all(number > skip for number in imports), f"{path.name} imports torch before pytest.importorskip"
