"""Extensions as docs/architecture.md describes them: the files that it lists are sufficient."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import small_network
from project import curve, environment
from tiny_runs import RUN, Tiny

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("workflow", "launchers", "manifests")


@dataclass(frozen=True)
class Addition:
    """Text to insert before an anchor in a file, and new files of the product."""

    section: str
    insertions: list[tuple[str, str, str]]
    files: dict[str, str] = field(default_factory=dict)


METRIC = Addition(
    "A metric",
    [
        ("workflow/spec/metrics.py", '    "graph",\n]\nTask', '    "error_rate",\n'),
        (
            "workflow/spec/metrics.py",
            '    "perplexity": Properties(',
            '    "error_rate": Properties(\n        meaning="share of wrong predictions",\n'
            '        tasks={"classes": "labels that are not the class of the largest logit"},\n'
            "        higher_is_better=False,\n    ),\n",
        ),
        (
            "workflow/graph/objective/metrics.py",
            "ATTACH: dict",
            "def _error_rate(edit: Editor, metric: MetricSection, of: Comparison) -> list[onnx.ValueInfoProto]:\n"
            '    wrong = edit("Not", edit("Equal", of.decision(edit), of.truth(edit)))\n'
            "    return _quotient(edit, metric.key, edit.cast(wrong), of.counted)\n\n\n",
        ),
        ("workflow/graph/objective/metrics.py", '    "accuracy": _accuracy,\n}', '    "error_rate": _error_rate,\n'),
    ],
)
OPTIMIZER = Addition(
    "An optimizer",
    [
        (
            "workflow/spec/optimizers.py",
            "Optimizer = Annotated[",
            'class SignSgd(OptimizerBase):\n    """The sign of the gradient."""\n\n    name: Literal["signsgd"]\n'
            '    """The update rule."""\n\n\n',
        ),
        ("workflow/spec/optimizers.py", "Adam | Lamb | Sgd | ", "SignSgd | "),
        (
            "workflow/spec/optimizers.py",
            '    "sgd": Properties',
            '    "signsgd": Properties(moments={"last_sign": None}),\n',
        ),
        ("workflow/optim/graph.py", "adagrad, adam, ", "signsgd, "),
        ("workflow/optim/graph.py", '    "sgd": sgd.update', '    "signsgd": signsgd.update,\n'),
    ],
    {
        "workflow/optim/signsgd.py": (
            "def update(build, optimizer, segments):\n"
            "    for i in range(len(segments)):\n"
            '        sign = build("Sign", f"gradients.{i}", output=f"last_sign.{i}.out")\n'
            '        change = build("Mul", sign, "learning_rate")\n'
            '        build("Sub", f"parameters.{i}", change, output=f"parameters.{i}.out")\n'
        )
    },
)
OPERATOR = Addition(
    "An operator",
    [("workflow/graph/operators/families.py", "    joins,\n", "    inverses,\n")],
    {
        "workflow/graph/operators/inverses.py": (
            "from ortflow.workflow.graph.rules.gradient import gradient_rule\n"
            "from ortflow.workflow.graph.rules.size import first_like_first, size_rule\n\n\n"
            '@gradient_rule("Inverse", domain="com.microsoft")\ndef inverse(b):\n'
            '    turned = b("Transpose", b.output(0), perm=[1, 0])\n'
            '    yield 0, b("Neg", b("MatMul", b("MatMul", turned, b.gradient()), turned))\n\n\n'
            'size_rule("Inverse")(first_like_first)\n'
        )
    },
)
KEY = Addition(
    "A key of the run file",
    [
        (
            "workflow/spec/monitor.py",
            '    runtime_log: Literal["verbose"',
            '    greeting: Text | None = None\n    """Printed when an attempt begins."""\n',
        ),
        (
            "workflow/steps/monitor.py",
            "        if context.leads:\n            self._changes()",
            "        if context.leads and context.spec.monitor.greeting:\n"
            "            print(context.spec.monitor.greeting, flush=True)\n",
        ),
    ],
)


LOSS = Addition(
    "A loss",
    [
        (
            "workflow/spec/losses.py",
            "class Huber(ValueLoss):",
            'class LogCosh(ValueLoss):\n    """log cosh(prediction - label), averaged over all elements."""\n\n'
            '    kind: Literal["log_cosh"]\n    """Kind of loss."""\n\n\n',
        ),
        ("workflow/spec/model.py", "    | Huber\n", "    | LogCosh\n"),
        ("workflow/spec/model.py", "    Huber,\n", "    LogCosh,\n"),
        ("workflow/graph/objective/by_element.py", "    Huber,\n    Poisson,\n", "    LogCosh,\n"),
        ("workflow/graph/objective/by_element.py", "Regression | Huber | ", "LogCosh | "),
        (
            "workflow/graph/objective/by_element.py",
            "FORMULAS: dict",
            'def _log_cosh(edit, loss, x, y):\n    return edit("Log", edit("Cosh", edit("Sub", x, y)))\n\n\n',
        ),
        ("workflow/graph/objective/by_element.py", "    Huber: _huber,\n", "    LogCosh: _log_cosh,\n"),
    ],
)
SCHEDULE = Addition(
    "A schedule",
    [
        ("workflow/spec/schedules.py", '    "constant", "linear", ', '    "square_root",\n'),
        ("workflow/spec/schedules.py", '    "inverse_sqrt": ShapeKeys', '    "square_root": ShapeKeys(_PLAIN),\n'),
        (
            "workflow/optim/schedule.py",
            '    if name == "one_cycle":',
            '    if name == "square_root":\n        return math.sqrt(max(total - step, 0) / total)\n',
        ),
    ],
)
FORMAT = Addition(
    "A data format",
    [
        ("workflow/data/sources/__init__.py", "image_folder, numpy_files, ", "flat_numbers, "),
        (
            "workflow/data/sources/__init__.py",
            '    Format("tokens", token_files',
            '    Format("flat numbers", flat_numbers.matches, flat_numbers.open_numbers),\n',
        ),
    ],
    {
        "workflow/data/sources/flat_numbers.py": (
            "import numpy as np\nfrom pathlib import Path\n"
            "from ortflow.workflow.data.mapped_arrays import MappedArrays\n\n\n"
            'def matches(path):\n    return path.suffix == ".f32"\n\n\n'
            "def open_numbers(section, places):\n"
            '    values = np.memmap(places[0], "<f4", "r").reshape(-1, 8)\n'
            '    return MappedArrays(Path(places[0]), [{"x": values[:, :5], "labels": values[:, 5:]}])\n'
        )
    },
)
PRECISION = Addition(
    "A precision",
    [
        ("workflow/spec/train.py", '"fp16", "bf16"] = "fp32"', '"fp16_unscaled", '),
        ("workflow/spec/train.py", '"fp16", "bf16")', '"fp16_unscaled", '),
        ("workflow/fusion/half.py", '"fp16": TensorProto.FLOAT16, ', '"fp16_unscaled": TensorProto.FLOAT16, '),
        ("workflow/fusion/halved.py", '"fp16": _scale, ', '"fp16_unscaled": _copy, '),
    ],
)
LAYOUT = Addition(
    "A layout",
    [
        (
            "workflow/spec/parallel.py",
            "    zero: Literal[0, 1, 2, 3] = 0",
            '    sums: Literal["fp32", "fp64"] = "fp32"\n    """Precision of sums over the replicas."""\n',
        ),
        (
            "workflow/trainer/opening.py",
            '    "whole, moments on the host": Parts(',
            '    "whole, exact sums": Parts("whole", "exact", "whole"),\n',
        ),
        ("workflow/trainer/opening.py", '"scatter", "in the graph", "divided"]', '"exact", '),
        (
            "workflow/trainer/opening.py",
            '    if spec.divides:\n        return "pipeline"',
            '    if spec.parallel.sums == "fp64":\n        return "whole, exact sums"\n',
        ),
        (
            "workflow/trainer/opening.py",
            '            case "scatter":\n                return self._scatter()',
            '            case "exact":\n'
            "                from ortflow.workflow.trainer.exact_sums import ExactSums\n\n"
            "                return ExactSums(context, buffers)\n",
        ),
    ],
    {
        "workflow/trainer/exact_sums.py": (
            "import numpy as np\n\n\n"
            "class ExactSums:\n    after_each = False\n\n"
            "    def __init__(self, context, buffers):\n"
            "        self._ranks, self._sync = context.replicas, buffers.sync\n"
            "        self._exact = context.device.allocate(buffers.sync.count, np.float64)\n"
            "        context.report.note(f'{self._ranks.world_size} ranks sum in fp64')\n\n"
            "    def sum_gradients(self):\n        pass\n\n"
            "    def sum_rest(self):\n"
            "        self._exact.write(self._sync.read().astype(np.float64))\n"
            "        self._ranks.all_reduce(self._exact)\n"
            "        self._sync.write(self._exact.read().astype(np.float32))\n\n"
            "    def sum_squares(self, squares):\n        pass\n\n"
            "    def sum_norms(self, sums):\n        pass\n\n"
            "    def settle(self):\n        pass\n\n"
            "    def gather_parameters(self):\n        pass\n"
        )
    },
)


def named(section: str) -> set[str]:
    """The files that the page's section lists."""
    page = (ROOT / "docs/architecture.md").read_text()
    text = page.split(f"### {section}\n")[1].split("\n#")[0]
    return set(re.findall(r"`(workflow/[\w/]+\.py)`", text))


def with_addition(tmp_path: Path, *additions: Addition) -> Path:
    """Copy the product with the additions; the folder for PYTHONPATH."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "ortflow", tmp_path / "ortflow", ignore=ignored)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / "ortflow" / folder, ignore=ignored)
    for addition in additions:
        new = {str(Path(name).with_name("NAME.py")) for name in addition.files}
        assert {file for file, _, _ in addition.insertions} | new == named(addition.section)
        for file, anchor, text in addition.insertions:
            path = tmp_path / "ortflow" / file
            before = path.read_text()
            assert before.count(anchor) == 1, (file, anchor)
            path.write_text(before.replace(anchor, text + anchor))
        for file, text in addition.files.items():
            (tmp_path / "ortflow" / file).write_text(text)
    return tmp_path


def output_of(source: Path, *arguments: str, folder: Path) -> str:
    """Output of Python with the copy in place of the product."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment(PYTHONPATH=str(source)), text=True,
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_file_page(source: Path) -> str:
    """docs/run-file.md as the copy generates it."""
    shutil.copytree(ROOT / "docs", source / "docs")
    output_of(source, str(source / "docs/run_file_tables.py"), folder=source)
    return (source / "docs/run-file.md").read_text()


def test_a_metric_an_optimizer_and_a_key_of_the_run_file(tmp_path: Path) -> None:
    source = with_addition(tmp_path, METRIC, OPTIMIZER, KEY)
    tiny = Tiny.make(
        tmp_path / "p",
        model={**RUN["model"], "metrics": ["accuracy", "error_rate"]},
        data={**RUN["data"], "eval": "set.arrow"},
        train={"steps": 12, "optimizer": {"name": "signsgd", "lr": 0.01}, "evaluation": {"every_steps": 6}},
        monitor={"every_steps": 1, "greeting": "good morning"},
    )
    refused = tiny.command("validate", "run.yaml")
    assert refused.code == 2
    for unknown in ("error_rate", "signsgd", "greeting"):
        assert unknown in refused.err
    output_of(source, "-m", "ortflow", "validate", "run.yaml", folder=tiny.folder)
    output_of(source, "-m", "ortflow", "run", "run.yaml", folder=tiny.folder)
    events = [json.loads(line) for line in (tiny.run_dir / "events/rank-0000.jsonl").read_text().splitlines()]
    found = [event for event in events if event["event"] == "evaluation"]
    assert [event["step"] for event in found] == [6, 12]
    assert all(event["accuracy"] + event["error_rate"] == pytest.approx(1) for event in found)
    manifest = next((tiny.run_dir / "checkpoints").glob("step-00000012/*.json")).read_text()
    assert "last_sign" in manifest
    assert "good morning" in (tiny.run_dir / "logs/attempt-00/rank-0000.log").read_text()
    page = run_file_page(source)
    assert "| `error_rate` | share of wrong predictions | classes |" in page
    assert "| `signsgd` | `last_sign` | element by element |" in page
    assert "greeting" in page


def prediction(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Of the tiny model in training mode."""
    network = small_network.tensors()
    hidden = x @ network["w"] + network["b"]
    hidden = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + 1e-5)
    values: npt.NDArray[np.float32] = np.maximum(hidden, 0) @ network["u"]
    return values


def test_a_loss_a_schedule_and_a_data_format(tmp_path: Path) -> None:
    source = with_addition(tmp_path, LOSS, SCHEDULE, FORMAT)
    tiny = Tiny.make(
        tmp_path / "p",
        model={"path": "model.onnx", "loss": {"kind": "log_cosh"}},
        data={"train": "set.f32", "micro_batch": 4, "shuffle": False},
        train={"steps": 4, "optimizer": {"name": "sgd", "lr": 0.1}, "schedule": {"name": "square_root"}},
    )
    values = np.random.default_rng(0).normal(size=(16, 8)).astype("<f4")
    values.tofile(tiny.folder / "set.f32")
    refused = tiny.command("validate", "run.yaml")
    assert refused.code == 2
    assert "log_cosh" in refused.err
    assert "square_root" in refused.err
    output_of(source, "-m", "ortflow", "run", "run.yaml", folder=tiny.folder)
    steps = curve(tiny.run_dir)
    assert [rate for *_, rate in steps] == pytest.approx([0.1 * math.sqrt((4 - step) / 4) for step in (1, 2, 3, 4)])
    assert steps[0][1] == pytest.approx(np.log(np.cosh(prediction(values[:4, :5]) - values[:4, 5:])).mean(), rel=1e-4)
    page = run_file_page(source)
    assert "`square_root`" in page
    assert "`log_cosh`" in page


def test_an_operator(tmp_path: Path) -> None:
    source = with_addition(tmp_path, OPERATOR)
    program = tmp_path / "compare.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'tests/support')!r})\n"
        "import numpy as np\nfrom gradients import check\n"
        "from onnx.reference.op_run import OpRun\n"
        "class Inverse(OpRun):\n"
        "    op_domain = 'com.microsoft'\n"
        "    def _run(self, x):\n"
        "        return (np.linalg.inv(x),)\n"
        "values = np.array([[2.0, 0.5, 0.0], [1.0, 3.0, -1.0], [0.0, 0.5, 1.5]])\n"
        "check('Inverse', {'x': values}, ['x'], domain='com.microsoft', new_ops=[Inverse])\n"
        "from onnx import TensorProto, helper\n"
        "from ortflow.workflow.graph.memory.concrete import concrete\n"
        "x = helper.make_tensor_value_info('x', TensorProto.FLOAT, ['rows', 3])\n"
        "y = helper.make_empty_tensor_value_info('y')\n"
        "inverse = helper.make_node('Inverse', ['x'], ['y'], domain='com.microsoft')\n"
        "model = helper.make_model(helper.make_graph([inverse], 'g', [x], [y]))\n"
        "assert concrete(model, {'x': [3, 3]})['y'] == (TensorProto.FLOAT, (3, 3))\n"
    )
    output_of(source, str(program), folder=tmp_path)


def test_a_precision(tmp_path: Path) -> None:
    source = with_addition(tmp_path, PRECISION)
    program = tmp_path / "build.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT / 'tests/support')!r})\n"
        "import onnx\nfrom graph_build_models import built, linear\n"
        "from ortflow.workflow.graph.forms import Form\n"
        "loss = {'kind': 'mse', 'label': 'target'}\n"
        "graphs = built(linear(Path('m.onnx')), loss, resources__gpus_per_rank=1, train__precision='fp16_unscaled')\n"
        "graph = onnx.load(Form.HALF.of(graphs.train)).graph\n"
        "assert onnx.TensorProto.FLOAT16 in {v.type.tensor_type.elem_type for v in graph.value_info}\n"
        "assert 'ortflow.loss_scale' not in {v.name for v in graph.input}\n"
    )
    output_of(source, str(program), folder=tmp_path)


def test_a_layout(tmp_path: Path) -> None:
    source = with_addition(tmp_path, LAYOUT)
    sections = {"train": {"steps": 4, "optimizer": {"name": "sgd", "lr": 0.1}}, "resources": {"ranks_per_node": 2}}
    exact = Tiny.make(tmp_path / "exact", **sections, parallel={"sums": "fp64"})
    plain = Tiny.make(tmp_path / "plain", **sections)
    refused = exact.command("validate", "run.yaml")
    assert refused.code == 2
    assert "sums" in refused.err
    for tiny in (exact, plain):
        output_of(source, "-m", "ortflow", "run", "run.yaml", folder=tiny.folder)
    logs = {tiny: (tiny.run_dir / "logs/attempt-00/rank-0000.log").read_text() for tiny in (exact, plain)}
    assert "2 ranks sum in fp64" in logs[exact]
    assert "fp64" not in logs[plain]
    assert [value for step in curve(exact.run_dir) for value in step] == pytest.approx(
        [value for step in curve(plain.run_dir) for value in step], rel=1e-5
    )
    assert "`sums`" in run_file_page(source)
