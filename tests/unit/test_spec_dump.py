"""A dumped spec loads back to an equal one, whatever texts and numbers it contains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_files import FULL, SMALL, spec_of

from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.run import TrainerRunSpec

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=100) | (
    st.sampled_from(
        [
            "1e-3",
            "12:30:00",
            "yes",
            "null",
            "~",
            "1_000",
            "<<",
            "*x",
            "&x",
            "!x",
            "0x1F",
            "a: b",
            "# c",
            " ",
            "\x85",
            "\u2028",
            " a\n b ",
        ]
    )
    | st.from_regex(r"[-+.0-9eE_:]{1,8}", fullmatch=True)
)
finite = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_subnormal=True)
keys = text.filter(lambda key: not key.startswith("$"))  # those are directives of an overlay
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
names = st.lists(text, max_size=3)
specs = st.builds(
    lambda **parts: spec_of(
        seed=parts["seed"],
        prepare=parts["patterns"],
        run_dir=parts["run_dir"],
        model={
            "path": parts["path"],
            "loss": {"kind": "cross_entropy", "label": parts["path"], "label_smoothing": 0.1},
            "parameters": {"freeze": parts["patterns"]},
        },
        data={
            "train": {"path": parts["path"], "columns": dict.fromkeys(parts["patterns"], "x[:-1]")},
            "micro_batch": 1,
            "pad_value": parts["pad"],
        },
        train={"steps": 9, "optimizer": {"name": "lamb", "lr": parts["lr"], "no_decay": parts["no_decay"]}},
        backends={
            "kubernetes": {"overlay": [{"kind": "MPIJob", "patch": parts["extra"]}]},
            "slurm": parts["slurm"],
        },
    ),
    seed=st.integers(0, 2**63 - 1),
    path=text,
    run_dir=st.none() | text,
    patterns=names,
    no_decay=st.none() | names,
    lr=finite,
    pad=st.dictionaries(text, st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)),
    extra=st.dictionaries(keys, anything, max_size=3),
    slurm=st.fixed_dictionaries(
        {"prologue": names.map(lambda lines: [line for line in lines if line.isprintable() and line[0] != "#"])},
        optional={
            "nodelist": st.sampled_from(["node[1-4,7]", "1e3", "0x1F"]),
            "begin": st.sampled_from(["12:30:00", "0130", "now+60"]),
            "container": st.fixed_dictionaries(
                {"image": text.filter(lambda name: name.isprintable() and name[0] != "-")}
            ),
        },
    ),
)


def back(spec: TrainerRunSpec, tmp_path: Path) -> TrainerRunSpec:
    file = tmp_path / "run.yaml"
    file.write_bytes(dump_run_file(spec).encode())
    return load_run_file(file)


@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(spec=specs)
def test_it_loads_back(spec: TrainerRunSpec, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert back(spec, tmp_path_factory.getbasetemp()) == spec


@pytest.mark.parametrize("source", [SMALL, FULL])
def test_the_examples_load_back(source: str, tmp_path: Path) -> None:
    file = tmp_path / "first.yaml"
    file.write_text(source)
    spec = load_run_file(file)
    assert back(spec, tmp_path) == spec
    assert dump_run_file(back(spec, tmp_path)) == dump_run_file(spec)


def test_every_key_in_the_order_of_the_model(tmp_path: Path) -> None:
    spec = spec_of()
    reported = yaml.safe_load(dump_run_file(spec))
    assert [*reported] == [*TrainerRunSpec.model_fields]
    assert [*reported["train"]["optimizer"]] == ["name", "lr", "weight_decay", "no_decay", "betas", "epsilon"]


def test_no_aliases() -> None:
    shared: dict[str, Any] = {"a": [1, 2]}
    overlay = [{"kind": "Job", "patch": patch} for patch in (shared, shared, {"b": shared["a"]})]
    reported = dump_run_file(spec_of(backends={"kubernetes": {"overlay": overlay}}))
    assert "&" not in reported
    assert "*" not in reported


def test_texts_that_other_yaml_readers_take_for_numbers_are_quoted() -> None:
    reported = dump_run_file(spec_of(resources={"time_limit": "12:30:00"}, name="1e-3"))
    assert 'name: "1e-3"\n' in reported
    assert "time_limit: '12:30:00'\n" in reported
