"""From text to a TrainerRunSpec: every class of fault in the user's terms, all of them together."""
# ruff: noqa: E501

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import get_args

import pytest
from messages import alike, says
from run_files import FULL, SMALL, check_run_file, reported

from ortflow.workflow.errors import Faults
from ortflow.workflow.spec.file.document import parse_document
from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.keys import every_key
from ortflow.workflow.spec.file.load import load_run_file, load_run_text
from ortflow.workflow.spec.optimizers import Adam


def load(tmp_path: Path, text: str, *overrides: str):  # type: ignore[no-untyped-def]
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load_run_file(file, overrides)


def changed(line: str, to: str) -> str:
    """SMALL with one line changed."""
    assert f"{line}\n" in SMALL
    return SMALL.replace(f"{line}\n", f"{to}\n" if to else "")


def test_the_small_and_the_full_one_load(tmp_path: Path) -> None:
    small = load(tmp_path, SMALL)
    assert isinstance(small.train.optimizer, Adam)
    assert (small.train.optimizer.lr, small.train.optimizer.betas) == (0.001, (0.9, 0.999))
    assert (small.model.loss.kind, small.data.train.path) == ("cross_entropy", "train.arrow")
    full = load(tmp_path, FULL)
    assert full.world_size == 6
    assert full.resources.time_limit == "1-02:00:00"
    assert full.backends.kubernetes.overlay[0].patch == {"metadata": {"annotations": {"x": None}}}
    assert full.backends.slurm.mail.types == ["END", "TIME_LIMIT_90"]
    assert full.backends.slurm.container is not None
    assert full.backends.slurm.container.mounts == ["/data:/d:ro"]


@pytest.mark.parametrize(
    ("line", "to", "message"),
    [
        # unknown keys
        ("  steps: 100", "  step: 100", "run.yaml:9 train.step: unknown key … steps?"),
        ("name: small", "name: small\nlr: 1", "run.yaml:2 lr: unknown key … train.optimizer.lr?"),
        (
            "    lr: 1e-3",
            "    lr: 1e-3\n    foo: 1",
            "run.yaml:13 train.optimizer.foo: unknown key … name, lr, weight_decay, no_decay, betas, epsilon",
        ),
        ("  steps: 100", "  steps: 100\n  average: {name: emma}", "run.yaml:10 train.average.name: must be ema or swa, not the text 'emma' … ema?"),
        ("  steps: 100", "  steps: 100\n  average: {name: ema, dekay: 0.9}", "run.yaml:10 train.average.dekay: unknown key … decay?"),
        ("  steps: 100", "  steps: 100\n  average: {name: ema, decay: 2}", "run.yaml:10 train.average.decay: must be less than 1.0, not 2"),
        ("  steps: 100", "  steps: 100\n  average: {name: swa}", "run.yaml:10 train.average.start: is missing … add it"),
        ("  steps: 100", "  steps: 100\n  groups: [{match: [], lr: 1.0}]", "run.yaml:10 train.groups[0].match: has 0 items; at least 1 are expected"),
        ("name: small", "name: small\nmonitor: {sinks: [{kind: prometheus}]}", "run.yaml:2 monitor.sinks[0]: needs a file or a port … give one of them"),
        ("name: small", "name: small\nmonitor: {sinks: [{kind: prom}]}", "run.yaml:2 monitor.sinks[0].kind: must be prometheus, wandb, mlflow, opentelemetry or installed, not the text 'prom'"),
        ("name: small", "name: small\nmonitor: {sinks: [{kind: prometheus, port: 99999}]}", "run.yaml:2 monitor.sinks[0].port: must be at most 65535, not 99999"),
        ("    lr: 1e-3", "    lr: 1e-3\n    momentum: 0.9", "run.yaml:13 train.optimizer.momentum: unknown key … known here: name, lr"),
        ("    lr: 1e-3", "    LR: 1e-3", "run.yaml:12 train.optimizer.LR: unknown key … lr?"),
        ("    name: adamw", "    nmae: adamw", "run.yaml:11 train.optimizer.nmae: unknown key … name?"),
        # missing keys
        (
            "    lr: 1e-3",
            "",
            "run.yaml:10 train.optimizer.lr: is missing … learning rate",
        ),
        ("    lr: 1e-3", "    lr:", "run.yaml:12 train.optimizer.lr: is missing … learning rate"),
        ("    name: adamw", "", "run.yaml:10 train.optimizer.name: is missing … adam, adamw, lamb, sgd, lion, rmsprop, adagrad, nadam, radam, adafactor or muon"),
        ("  loss: cross_entropy", "  loss: output", "run.yaml:4 model.loss.output: is missing … output"),
        # choices
        (
            "    name: adamw",
            "    name: adan",
            "run.yaml:11 train.optimizer.name: … adam, adamw, lamb, sgd, lion, rmsprop, adagrad, nadam, radam, adafactor or muon … 'adan' … adam?",
        ),
        (
            "  loss: cross_entropy",
            "  loss: {kind: crossentropy}",
            "run.yaml:4 model.loss.kind: … cross_entropy, focal, multi_margin, dice, mse, l1, huber, … output … 'crossentropy' … cross_entropy?",
        ),
        (
            "  loss: cross_entropy",
            "  loss: cross_entropy\n  metrics: [accuracy, bleu]",
            "run.yaml:5 model.metrics[1].name: must be accuracy, perplexity, … 'bleu'",
        ),
        (
            "  steps: 100",
            "  steps: 100\n  schedule: cosin",
            "run.yaml:10 train.schedule.name: … constant, linear, polynomial, cosine … 'cosin' … cosine?",
        ),
        ("  micro_batch: 4", "  micro_batch: 4\nparallel: {zero: 4}", "run.yaml:8 parallel.zero: … 0, 1, 2 or 3 … 4"),
        # types
        ("  steps: 100", '  steps: "100"', "run.yaml:9 train.steps: … whole number … '100' … quotes: 100"),
        ("  steps: 100", "  steps: 1e5", "run.yaml:9 train.steps: … whole number … 100000.0 … 100000"),
        ("  steps: 100", "  steps: 1.5", "run.yaml:9 train.steps: … whole number … 1.5"),
        ("  steps: 100", "  steps: true", "run.yaml:9 train.steps: … whole number … true"),
        ("  steps: 100", "  steps: [1]", "run.yaml:9 train.steps: … whole number … a list"),
        ("    lr: 1e-3", "    lr: fast", "run.yaml:12 train.optimizer.lr: … number … 'fast'"),
        ("    lr: 1e-3", '    lr: "1e-3"', "run.yaml:12 train.optimizer.lr: … number … '1e-3' … quotes: 1e-3"),
        ("    lr: 1e-3", "    lr: .nan", "run.yaml:12 train.optimizer.lr: … finite … nan"),
        ("    lr: 1e-3", "    lr: 1e999", "run.yaml:12 train.optimizer.lr: … finite … inf"),
        ("  micro_batch: 4", "  micro_batch: 4\n  shuffle: yes", "run.yaml:8 data.shuffle: … true or false … 'yes' … true"),
        ("  micro_batch: 4", "  micro_batch: 4\n  shuffle: 0", "run.yaml:8 data.shuffle: … true or false … 0 … false"),
        ("name: small", "name: 3", "run.yaml:1 name: … text … 3 … quotes"),
        ("name: small", "name: small\nprepare: [python, 4]", "run.yaml:2 prepare[1]: … text … 4 … quotes"),
        ("  path: model.onnx", "  path: [model.onnx]", "run.yaml:3 model.path: … text … list"),
        ("  loss: cross_entropy", "  loss: cross_entropy\n  labels: y", "run.yaml:5 model.labels: … list … 'y' … ['y']"),
        ("  train: train.arrow", "  train: 3", "run.yaml:6 data.train: … mapping … 3"),
        ("  micro_batch: 4", "  micro_batch: 4\n  pad_value: 3", "run.yaml:8 data.pad_value: … mapping … 3"),
        ("  micro_batch: 4", "  micro_batch: 4\n  pad_value: {x: a}", "run.yaml:8 data.pad_value.x: … number … 'a'"),
        ("  micro_batch: 4", "  micro_batch: 4\nrestart: 3", "run.yaml:8 restart: … mapping … 3"),
        ("    lr: 1e-3", "    lr: 1e-3\n    betas: 0.9", "run.yaml:13 train.optimizer.betas: … list … 0.9"),
        (
            "    lr: 1e-3",
            "    lr: 1e-3\n    betas: [0.9]",
            "run.yaml:13 train.optimizer.betas: … too few … first and second moment",
        ),
        ("    lr: 1e-3", "    lr: 1e-3\n    betas: [0.9, 1, 1]", "run.yaml:13 train.optimizer.betas: … 3 … 2"),
        ("    lr: 1e-3", '    lr: 1e-3\n    betas: [0.9, "1"]', "run.yaml:13 train.optimizer.betas[1]: … number … '1' … quotes: 1"),
        # ranges
        ("  micro_batch: 4", "  micro_batch: 0", "run.yaml:7 data.micro_batch: … more than 0 … 0"),
        ("  steps: 100", "  steps: 100\n  gradient_accumulation: 0", "run.yaml:10 train.gradient_accumulation: … more than 0 … 0"),
        ("name: small", "name: small\nseed: -1", "run.yaml:2 seed: … at least 0 … -1"),
        ("name: small", f"name: small\nseed: {2**63}", "run.yaml:2 seed: … at most 2^63 - 1 … 9223372036854775808"),
        ("name: small", f"name: small\nseed: {10**4000}", "run.yaml:2 seed: … at most 2^63 - 1 … very large"),
        ("    lr: 1e-3", "    lr: 1e-3\n    betas: [0.9, 1]", "run.yaml:13 train.optimizer.betas[1]: … less than 1.0 … 1"),
        # text
        (
            "name: small",
            "name: My_Run",
            "run.yaml:1 name: … 'My_Run' … lower-case letters, digits and hyphens … 52",
        ),
        ("  path: model.onnx", '  path: ""', "run.yaml:3 model.path: … empty"),
        ("  path: model.onnx", '  path: "a\\0b"', "run.yaml:3 model.path: … NUL"),
        ("name: small", "name: small\nprepare: 'it''s'", "run.yaml:2 prepare: … unclosed quotation mark"),
        # amounts
        ("name: small", "name: small\nresources: {memory: 16}", "run.yaml:2 resources.memory: … '16' … memory … unit … 16G"),
        (
            "name: small",
            "name: small\nresources: {time_limit: 12:30}",
            "run.yaml:2 resources.time_limit: … '12:30' … duration … [days-]hours:minutes:seconds … minutes",
        ),
        # the file as such
        ("  steps: 100", "  steps: 100\n  steps: 200", "run.yaml:10 train.steps: … twice … 9"),
        ("  steps: 100", "  steps: *x", "run.yaml:9 train.steps: … alias (*x) … quotes"),
    ],
)  # fmt: skip
def test_one_fault(tmp_path: Path, line: str, to: str, message: str) -> None:
    assert alike(reported(tmp_path, changed(line, to)), [message])


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", ["run.yaml: is empty … name, model, data and train"]),
        ("# nothing\n", ["run.yaml: is empty … name, model, data and train"]),
        ("- a\n", ["run.yaml: has no keys … `train:`"]),
        ("hello\n", ["run.yaml: has no keys … `train:`"]),
        (
            SMALL.partition("data:")[0],
            [
                "run.yaml data: is missing … samples",
                "run.yaml train: is missing … optimisation",
            ],
        ),
        ("a: [1\n", ["run.yaml:2: … YAML … ',' or ']'"]),
    ],
)
def test_a_file_that_is_not_a_run(tmp_path: Path, text: str, messages: list[str]) -> None:
    assert alike(reported(tmp_path, text), messages)


def test_all_faults_together_and_by_line(tmp_path: Path) -> None:
    text = """\
name: Bad
seed: "3"
model:
  pth: model.onnx
  loss: {kind: output}
data:
  train: train.arrow
  micro_batch: 0
  micro_batch: 8
  last_batch: pad
trian:
  stpes: 100
train:
  stpes: 100
  epochs: 3
  optimizer: {name: sgd, lr: fast, nesterov: true}
parallel:
  data: 3
  schedule: gpipe
resources:
  memory: lots
  ranks_per_node: 2
checkpoint:
  directory: ../x
"""
    assert [re.match(r"\S+ [\w. ,]*(?=:)", line).group() for line in reported(tmp_path, text, "train.foo=1", "seed")] == [
        "run.yaml:1 name",
        "run.yaml:2 seed",
        "run.yaml:4 model.pth",
        "run.yaml:5 model.loss.output",
        "run.yaml:9 data.micro_batch",
        "run.yaml:10 data.last_batch",
        "run.yaml:11 trian",
        "run.yaml:14 train.stpes",
        "run.yaml:16 train.optimizer.lr",
        "run.yaml:16 train.optimizer.nesterov",
        "run.yaml:18 parallel.data",
        "run.yaml:19 parallel.schedule",
        "run.yaml:21 resources.memory",
        "run.yaml:24 checkpoint.directory",
        "on the command line",
        "on the command line, train.foo",
    ]  # fmt: skip


def test_an_effect_of_a_fault_is_not_a_fault_of_its_own(tmp_path: Path) -> None:
    """A misspelt `steps` does not also miss steps; a wrong count of ranks does not also clash with the degrees."""
    text = changed("  steps: 100", "  setps: 100") + "parallel: {data: 2}\nresources: {ranks_per_node: two}\n"
    assert [line.partition(":")[2].partition(":")[0] for line in reported(tmp_path, text)] == [
        "9 train.setps",
        "14 resources.ranks_per_node",
    ]


def test_faults_carry_their_place(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(changed("  steps: 100", "  step: 100"))
    with pytest.raises(Faults) as caught:
        load_run_file(file)
    (fault,) = check_run_file(file, files=False)
    assert (fault.file, fault.line, fault.key) == (str(file), 9, "train.step")
    assert [str(each) for each in caught.value.faults] == [str(fault)]
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_there() -> None:
    (fault,) = check_run_file(Path("nowhere/run.yaml"))
    assert "nowhere/run.yaml" in str(fault)


def test_what_is_reported_stays_on_its_line(tmp_path: Path) -> None:
    """Keys and values may contain anything; the terminal gets one printable line per fault."""
    for line in reported(tmp_path, SMALL + '"a\\nb\\e[31m": 1\n"\\ud800": 1\nseed: "x\\ny\\ud800"\n'):
        assert line.isprintable()
        line.encode()


def test_a_key_without_a_value_is_not_given(tmp_path: Path) -> None:
    text = SMALL + "restart:\n#  failures: 3\nseed:\nprepare:\n"
    assert load(tmp_path, text) == load(tmp_path, SMALL)
    assert alike(reported(tmp_path, SMALL + "retsart:\n"), ["run.yaml:13 retsart: unknown key … restart?"])


def test_short_forms(tmp_path: Path) -> None:
    short = changed("  steps: 100", "  steps: 100\n  schedule: linear")
    short += "prepare: python 'my file.py' --layers 4\nresources: {time_limit: 90}\n"
    long = changed("  steps: 100", "  steps: 100\n  schedule: {name: linear}")
    long = long.replace("loss: cross_entropy", "loss: {kind: cross_entropy}")
    long = long.replace("train: train.arrow", "train: {path: train.arrow}")
    long += 'prepare: [python, my file.py, --layers, "4"]\nresources: {time_limit: "90"}\n'
    assert load(tmp_path, short) == load(tmp_path, long)


class TestOverrides:
    def test_values(self, tmp_path: Path) -> None:
        spec = load(
            tmp_path,
            SMALL,
            "train.steps=7",
            "data.train.path=x=y.arrow",
            "train.optimizer.betas=[0.9, 0.95]",
            "train.optimizer.lr=3e-4",
            "data.eval=e.arrow",
            "checkpoint.keep.newest=5",
            'model.parameters.freeze=["*.bias"]',
        )
        assert spec.train.steps == 7
        assert spec.data.train.path == "x=y.arrow"
        assert (spec.train.optimizer.betas, spec.train.optimizer.lr) == ((0.9, 0.95), 0.0003)
        assert spec.data.eval.path == "e.arrow"
        assert spec.checkpoint.keep.newest == 5
        assert spec.model.parameters.freeze == ["*.bias"]

    def test_the_last_one_wins(self, tmp_path: Path) -> None:
        assert load(tmp_path, SMALL, "train.steps=7", "train.steps=8").train.steps == 8

    def test_null_takes_away(self, tmp_path: Path) -> None:
        spec = load(tmp_path, SMALL, "train.steps=null", "train.epochs=2")
        assert (spec.train.steps, spec.train.epochs) == (None, 2)

    def test_null_disables_what_its_help_says(self, tmp_path: Path) -> None:
        """Every key whose default is not null and that accepts null: null does not select the default."""
        disabled = [
            path
            for path, field in every_key()
            if type(None) in get_args(field.annotation) and not field.is_required() and field.default is not None
        ]
        assert {(*path[:1], path[-1]) for path in disabled} == {("model", "ignore_index"), ("restart", "hung_seconds")}
        text = SMALL + "restart: {hung_seconds: null, failures: null}\n"
        for spec in (load(tmp_path, text), load(tmp_path, SMALL, "restart.hung_seconds=null")):
            assert (spec.restart.hung_seconds, spec.restart.failures) == (None, 3)
            assert load_run_text(dump_run_file(spec), "run.yaml").restart.hung_seconds is None

    def test_a_key_of_a_section_given_short(self, tmp_path: Path) -> None:
        spec = load(tmp_path, SMALL, "data.train.columns={x: y}", "model.loss.ignore_index=0")
        assert (spec.data.train.path, spec.data.train.columns) == ("train.arrow", {"x": "y"})
        assert spec.model.loss.ignore_index == 0

    def test_a_whole_section(self, tmp_path: Path) -> None:
        spec = load(
            tmp_path, SMALL, "model.loss=mse", "train.optimizer={name: sgd, lr: 1}", "train.optimizer.momentum=0.9"
        )
        assert spec.model.loss.kind == "mse"
        assert (spec.train.optimizer.name, spec.train.optimizer.momentum) == ("sgd", 0.9)

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("train.stpes=3", "on the command line, train.stpes: unknown key … steps?"),
            ("train.steps=x", "on the command line, train.steps: … whole number … 'x'"),
            ("train.steps", "on the command line: 'train.steps' … override … key.path=value"),
            ("=3", "on the command line: '=3' … override … key.path=value"),
            ("a..b=3", "on the command line: 'a..b=3' … override … key.path=value"),
            ("train.steps.x=3", "on the command line, train.steps.x: … train.steps has no keys"),
            ("train.optimizer={lr: 1}", "on the command line, train.optimizer.name: is missing … adam, adamw, lamb, sgd, lion, rmsprop, adagrad, nadam, radam, adafactor or muon"),
            (
                "model.parameters.freeze=[*.bias]",
                "on the command line, model.parameters.freeze: … YAML … '.' … begins with * in quotes",
            ),
            ("train.early_stop.patiance=3", "on the command line, train.early_stop.patiance: unknown key … patience?"),
            ("train.optimizer.betas=[1]", "on the command line, train.optimizer.betas[0]: … less than 1.0 … 1"),
            ("train.epochs=3", "run.yaml:9 train.steps: … train.epochs … train.epochs=null on the command line"),
        ],
    )  # fmt: skip
    def test_faults(self, tmp_path: Path, override: str, message: str) -> None:
        assert says(reported(tmp_path, SMALL, override)[0], message)

    @pytest.mark.parametrize(
        ("override", "messages"),
        [
            ("train.steps=3", ["run.yaml train.optimizer: is missing … update rule"]),
            (
                "train.optimizer.name=sgd",
                [
                    "run.yaml train.optimizer.lr: is missing … learning rate",
                    "run.yaml train.steps: is missing … train.epochs … one of them",
                ],
            ),
            ("train={steps: 3}", ["on the command line, train.optimizer: is missing … update rule"]),
            ("trian.steps=3", ["on the command line, trian: unknown key … train?"]),
        ],
    )
    def test_what_is_missing_beside_a_key_is_missing_in_the_file(
        self, tmp_path: Path, override: str, messages: list[str]
    ) -> None:
        found = reported(tmp_path, SMALL[: SMALL.index("\ntrain:") + 1], override)
        assert alike(found, messages)


def test_many_unknown_keys_cost_no_more_than_reading_them() -> None:
    """Each used to walk the types of all keys and to copy all values."""
    text = SMALL + "".join(f"zz_{number}: 1\n" for number in range(3000))
    start = time.process_time()
    document = parse_document(text, "run.yaml")
    reading = time.process_time() - start
    assert not document.problems
    start = time.process_time()
    with pytest.raises(Faults) as caught:
        load_run_text(text, "run.yaml")
    assert len(caught.value.faults) == 3000
    assert time.process_time() - start < 3 * reading + 1


def test_a_section_that_is_unknown_at_its_place_names_where_it_belongs() -> None:
    with pytest.raises(Faults) as caught:
        load_run_text(f"{SMALL}ranks_per_node: 2\n", "run.yaml")
    assert "resources.ranks_per_node" in str(caught.value)
