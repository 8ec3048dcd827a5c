"""`ortflow plan`: its memory is what ranks measure, its layouts are valid, and its keys train."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from kernels import needs_kernels
from messages import mentions, says
from project import FEW_CORES, Project, command, logs, of_kind
from rotation import rotating
from tiny_runs import Tiny

from ortflow.cli.validate import examine
from ortflow.workflow.planning.built import built
from ortflow.workflow.planning.forecast import Forecast, divided_memory, forecast
from ortflow.workflow.planning.holdings import state_of
from ortflow.workflow.planning.ranks import RankMemory
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer.divided_opening import division_of

pytestmark = [needs_kernels, pytest.mark.rotates("plans")]
STATE = ("parameters", "gradients", "moments", "checkpoint")
QUICK: dict[str, Any] = {
    "train__steps": 2, "train__schedule": {"name": "constant"}, "train__evaluation": None, "data__eval": None,
    "train__check_gradient": False, "export__enabled": False, "checkpoint__every_steps": 2,
    "resources__cpus_per_rank": 1,
}  # fmt: skip
LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, {"pipeline": 2}),
    "gpipe": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "interleaved": (2, {"pipeline": 2, "schedule": "interleaved", "chunks": 2}),
    "horizontal": (2, {"horizontal": 2}),
    "data-pipeline": (4, {"pipeline": 2, "zero": 1}),
    "data-horizontal": (4, {"horizontal": 2, "zero": 2}),
    "data": (2, {}),
    "zero-3": (2, {"zero": 3}),
}
ALWAYS = ("data-pipeline", "horizontal", "zero-3")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Its activations are as large as everything else that a rank holds."""
    folder = tmp_path_factory.mktemp("large")
    return Project.make(folder, dropout=0.0, layers=4, width=256, heads=8, length=256)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("small"), dropout=0.0)


def plan(project: Project, file: Path, *arguments: str, code: int = 0) -> str:
    done = command("plan", file.name, *arguments, folder=project.folder, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def found(project: Project, file: Path, *arguments: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(plan(project, file, "--json", *arguments))
    return data


@pytest.mark.parametrize("name", rotating(LAYOUTS, ALWAYS))
def test_predicted_memory_is_what_ranks_measure(name: str, large: Project) -> None:
    """State to the byte on each rank; the graphs' values and messages, from a small to a large batch, within 10%."""
    ranks, parallel = LAYOUTS[name]
    values: list[list[int]] = []
    predicted: list[list[int]] = []
    for batch in (1, 8):
        changes = {
            **QUICK, "parallel": parallel, "resources__ranks_per_node": ranks, "data__micro_batch": batch,
            "train__global_batch": 4 * batch, "train__steps": 1, "checkpoint__every_steps": 1,
        }  # fmt: skip
        file = large.write(f"{name}-{batch}", **changes)
        done = command("run", file.name, folder=large.folder, timeout=300, **FEW_CORES)
        run_dir = large.run_dir(f"{name}-{batch}")
        assert done.returncode == 0, done.stdout + done.stderr + logs(run_dir)
        measured = [of_kind(run_dir, "memory", rank)[0] for rank in range(ranks)]
        # The record of the run says where the model is cut.
        spec = resolve_paths(load_run_file(file, files=True), file, large.folder)
        memories, states = predictions(spec)
        assert states == [{part: each[part] for part in STATE} for each in measured]
        assert all(each.peak.unknown == () for each in memories)
        # The event counts the messages of stages among the values, and the layers that are fetched apart.
        counted = ("activations", "batch", *(("messages",) if spec.divides else ()))
        predicted.append([sum(each.parts.get(part, 0) for part in counted) for each in memories])
        values.append([measured[each.rank]["values"] for each in memories])
    for few, many, less, more in zip(*values, *predicted, strict=True):
        print(f"{name}: predicted {more - less:,}, measured {many - few:,}: {(more - less) / (many - few):.3f}")
        assert many - few > 80e6, "large enough to be seen"
        assert 0.9 <= (more - less) / (many - few) <= 1.1


def predictions(spec: TrainerRunSpec) -> tuple[Sequence[RankMemory | Forecast], list[dict[str, int]]]:
    """Memory of the ranks of a replica, or of rank 0 of an undivided model, and the state of each rank of the run."""
    with built(spec) as graphs:
        index, division = graphs.graphs.index, None
        memories: Sequence[RankMemory | Forecast] = [forecast(spec)]
        if spec.divides:
            memories = divided_memory(spec, graphs.graphs, graphs.shapes, graphs.bytes)
            division = division_of(graphs.graphs, spec)
        states = [state_of(spec, index, division, rank) for rank in range(spec.world_size)]
    return memories, [{part: state[part] for part in STATE} for state in states]


def test_the_fastest_layout_is_faster_than_a_clearly_slower_one(tmp_path: Path) -> None:
    """In runs of both. With few tokens and many micro-batches, fetching parameters takes longer than computing."""
    narrow = Project.make(tmp_path / "narrow", dropout=0.0, layers=4, width=256, heads=8, length=4)
    file = narrow.write("times", **QUICK, data__micro_batch=1, train__global_batch=8)
    listed = found(narrow, file, "--ranks", "2", "--no-measure")["layouts"]
    best, *others = listed
    slower = [each for each in others if each["seconds"] >= 1.5 * best["seconds"]]
    assert slower, listed
    seconds = []
    for layout in (best, slower[0]):
        keys = [f"{section}.{key}={json.dumps(value)}" for section, values in layout["keys"].items()
                for key, value in values.items()]  # fmt: skip
        words = ["run", file.name, "--fresh", *keys, "train.steps=8", "checkpoint.every_steps=8"]
        done = command(*words, folder=narrow.folder, timeout=300, **FEW_CORES)
        assert done.returncode == 0, done.stdout + done.stderr + logs(narrow.run_dir("times"))
        # Other work on the machine only lengthens steps. The first ones warm up.
        seconds.append(min(event["seconds"] for event in of_kind(narrow.run_dir("times"), "step")[2:]))
    print(f"{best['parallel']}: {seconds[0]:.3f} s, {slower[0]['parallel']}: {seconds[1]:.3f} s a step")
    assert seconds[0] < seconds[1], (best, slower[0])


def test_the_listed_layouts_are_valid_and_inspect_predicts_the_same(small: Project) -> None:
    file = small.write("listed", **QUICK, train__global_batch=8, data__micro_batch=2)
    listed = found(small, file, "--ranks", "4", "--no-measure")
    sections = [each["parallel"] for each in listed["layouts"]]
    assert {"data": 4} in sections
    assert {"data": 1, "pipeline": 4, "schedule": "gpipe"} in sections
    assert {"data": 2, "horizontal": 2, "zero": 2} in sections
    seconds = [each["seconds"] for each in listed["layouts"]]
    assert all(first < 1.16 * later for first, later in combinations(seconds, 2))
    for each in listed["layouts"]:
        keys = [f"parallel.{key}={json.dumps(value)}" for key, value in each["parallel"].items()]
        assert examine(file, [*keys, "resources.ranks_per_node=4"], None).faults == [], each["parallel"]
    for section in (
        {"data": 4, "zero": 3}, {"data": 2, "pipeline": 2, "schedule": "1f1b"}, {"data": 2, "horizontal": 2},
    ):  # fmt: skip
        keys = [f"parallel.{key}={json.dumps(value)}" for key, value in section.items()]
        words = ["inspect", "--json", "--plan", file.name, *keys, "resources.ranks_per_node=4"]
        inspected = json.loads(command(*words, folder=small.folder).stdout)
        (mine,) = (each for each in listed["layouts"] if each["parallel"] == section)
        assert (inspected["parts"], inspected["rank"]) == (mine["parts"], mine["rank"]), section


def test_its_keys_train(small: Project) -> None:
    """As a user would: the text that it prints for a pipeline, appended to the run file."""
    file = small.write("keys", **QUICK, data__micro_batch=2, train__gradient_accumulation=4)
    listed = found(small, file, "--ranks", "2", "--no-measure")
    number = next(n for n, each in enumerate(listed["layouts"], 1) if each["parallel"].get("chunks") == 2)
    text = plan(small, file, "--ranks", "2", "--no-measure", "--layout", str(number))
    _, _, rest = text.partition(f"keys of layout {number}:\n")
    keys = yaml.safe_load(rest.partition("Seconds are")[0])
    assert keys["parallel"] == {"data": 1, "pipeline": 2, "schedule": "interleaved", "chunks": 2}
    assert keys["train"] == {"gradient_accumulation": 8}, "four of each of two ranks"
    assert listed["layouts"][number - 1]["keys"] == keys
    run = yaml.safe_load(file.read_text())
    for section, values in keys.items():
        run[section] = {**run.get(section, {}), **values}
    file.write_text(yaml.safe_dump(run))
    done = command("run", file.name, folder=small.folder, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 replica(s) of 2 ranks x micro_batch 2" in logs(small.run_dir("keys"))
    assert [event["step"] for event in of_kind(small.run_dir("keys"), "step")] == [1, 2]


def test_a_budget_that_is_too_small_names_the_smallest_that_fits(large: Project) -> None:
    file = large.write("budget", **QUICK, train__global_batch=32, data__micro_batch=8)
    error = plan(large, file, "--memory", "50MB", "--no-measure", code=2)
    assert error.count("\n") == 1
    assert says(error, "error: --memory: … 2 ranks … 50 MB … smallest needs")
    need = error.split("the smallest needs ")[1].split(" MB")[0]
    fits = found(large, file, "--memory", f"{need}MB", "--no-measure")
    assert fits["layouts"], "the memory that the message named"
    assert max(each["memory"] for each in fits["layouts"]) <= int(need) * 10**6
    assert fits["too_large"]
    less = plan(large, file, "resources.memory=100MB", "--no-measure", code=2)
    assert mentions(less, "resources.memory: … 2 ranks … 50 MB")


def test_layouts_that_fit_only_with_recomputation_are_listed_with_it(large: Project) -> None:
    """Predicted memory of two ranks of a pipeline is what a run with the printed keys measures."""
    short = {**QUICK, "train__steps": 1, "checkpoint__every_steps": 1}
    file = large.write("recompute", **short, train__global_batch=32, data__micro_batch=8)
    plain = found(large, file, "--no-measure")
    assert all(each["recompute"] is None for each in plain["layouts"]), "all fit"
    needs = {json.dumps(each["parallel"]): each for each in plain["layouts"]}
    budget = sorted(each["memory"] for each in plain["layouts"])[3]
    listed = found(large, file, "--no-measure", "--memory", f"{budget // 1000 + 1}k")
    seconds = [each["seconds"] for each in listed["layouts"]]
    assert all(first < 1.16 * later for first, later in combinations(seconds, 2)), "the simplest within 15% is first"
    more = [each for each in listed["layouts"] if each["recompute"] == "layers"]
    assert more
    for each in listed["layouts"]:
        before = needs[json.dumps(each["parallel"])]
        assert (before["memory"] > budget + 1000) == (each["recompute"] == "layers"), each["parallel"]
        if each["recompute"]:
            assert each["parts"]["activations"] < before["parts"]["activations"]
            assert each["keys"]["model"] == {"recompute": "layers"}
            assert 1.05 < each["seconds"] / before["seconds"] < 1.5, "a forward pass is a third of both"
    chosen = next(each for each in more if each["parallel"].get("schedule") == "gpipe")
    keys = [f"{section}.{key}={json.dumps(value)}" for section, values in chosen["keys"].items()
            for key, value in values.items()]  # fmt: skip
    done = command("run", file.name, *keys, folder=large.folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr + logs(large.run_dir("recompute"))
    peak = max(of_kind(large.run_dir("recompute"), "memory", rank)[0]["peak"] for rank in range(2))
    assert 0.85 < chosen["memory"] / peak < 1.15, (chosen["memory"], peak)
    assert peak < needs[json.dumps(chosen["parallel"])]["memory"]


def test_a_model_without_layers_is_planned_without_recomputation(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "tiny", resources={"ranks_per_node": 2, "cpus_per_rank": 1})
    everything = tiny.command("plan", "run.yaml", "--no-measure", "--json")
    memories = sorted({each["memory"] for each in json.loads(everything.out)["layouts"]})
    assert len(memories) > 1, everything.said
    done = tiny.command("plan", "run.yaml", "--no-measure", "--memory", f"{(memories[0] + 8) / 1000}k", "--json")
    assert done.code == 0, done.said
    listed = json.loads(done.out)
    assert listed["too_large"]
    assert all(each["recompute"] is None for each in (*listed["layouts"], *listed["too_large"]))
    (note,) = listed["notes"]
    assert note.startswith("model.recompute: layers is not considered: ")


def test_what_is_refused_is_counted_with_its_reason(small: Project) -> None:
    file = small.write("refused", **QUICK, train__global_batch=8, data__micro_batch=2)
    text = plan(small, file, "--ranks", "4", "--no-measure", "--refused")
    assert "layouts fit, 0 need more memory, " in text
    assert mentions(text, "parallel.zero is 2")
    assert "refused: data 1 x horizontal 4: parallel.horizontal" in text, "two heads are not divisible by four"
    three = plan(small, file, "--ranks", "3", "--no-measure", "--refused")
    assert mentions(three, "train.global_batch is 8 … 3 ranks x 2 samples (data.micro_batch)")
    many = plan(small, file, "train.global_batch=4000", "--no-measure", code=2)
    assert mentions(many, "no layout of 2 ranks … data 2: data.last_batch")
    wrong = plan(small, file, "--layout", "99", "--no-measure", code=2)
    assert wrong.startswith("error: --layout: is 99, and ")
    assert "is not an amount of memory" in plan(small, file, "--memory", "much", code=2)
    gpus = plan(small, file, "resources.gpus_per_rank=1", code=2)
    assert "--memory" in gpus


def test_speeds_are_measured_here(small: Project) -> None:
    file = small.write("measured", **QUICK, train__global_batch=8, data__micro_batch=2)
    measured = found(small, file, "--measure")
    assert mentions(measured["prediction"][0], "micro-batch of the undivided model")
    assert mentions(measured["prediction"][1], "measured … all-reduce")
    assert mentions(measured["prediction"][-1], "Stages … time of each node")
    counted = found(small, file, "--no-measure")["prediction"]
    assert "at an assumed" in counted[0]
    assert mentions(counted[-1], "Stages … counted operations … parallel.cuts")
    assert all(0 < each["seconds"] < 60 for each in measured["layouts"])
    assert not small.run_dir("measured").exists()
