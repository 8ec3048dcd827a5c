"""Checks across sections."""

from __future__ import annotations

from typing import Any

import pytest
from run_files import spec_of

from ortflow.workflow.spec.checks.check import CHECKS, check
from ortflow.workflow.spec.problem import dotted

ADAMW = {"name": "adamw", "lr": 0.001}
TRAIN = {"steps": 100, "optimizer": ADAMW}
DATA = {"train": {"path": "t.arrow"}, "micro_batch": 4}
EVAL = {**DATA, "eval": {"path": "e.arrow"}}


def model(loss: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"path": "m.onnx", "loss": loss or {"kind": "cross_entropy"}, **more}


def test_a_run_that_agrees_with_itself() -> None:
    assert check(spec_of()) == []
    sections = {
        "model": model(metrics=["accuracy", "perplexity"]),
        "data": EVAL,
        "train": {
            **TRAIN,
            "optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.9, "nesterov": True},
            "schedule": {"warmup_steps": 100},
            "evaluation": {"every_steps": 10},
            "early_stop": {"metric": "perplexity"},
        },
        "parallel": {"data": 6},
        "resources": {"nodes": 2, "ranks_per_node": 3, "memory": "1G", "time_limit": "10"},
        "checkpoint": {"directory": "saved/here"},
        "export": {"path": "/elsewhere/model.onnx"},
    }
    assert check(spec_of(**sections)) == []
    for parallel, ranks in (
        ({"pipeline": 2}, 2), ({"horizontal": 2, "zero": 2}, 4), ({"pipeline": 2, "horizontal": 2, "zero": 1}, 8),
        ({"pipeline": 2, "schedule": "interleaved", "chunks": 2, "cuts": [["a"], ["b"], ["c"]]}, 2),
    ):  # fmt: skip
        assert check(spec_of(parallel=parallel, resources={"ranks_per_node": ranks})) == []
    for stage in (1, 2, 3):
        assert check(spec_of(parallel={"zero": stage}, resources={"ranks_per_node": 3})) == []
        train = {**TRAIN, "offload": "optimizer"}
        assert check(spec_of(parallel={"zero": stage}, train=train, resources={"gpus_per_rank": 1})) == []
        assert check(spec_of(parallel={"zero": stage}, resources={"ranks_per_node": 3, "gpus_per_rank": 1})) == []
    for layout in ({"pipeline": 2}, {"horizontal": 2}, {"pipeline": 2, "zero": 1}):
        assert check(spec_of(parallel=layout, resources={"ranks_per_node": 4, "gpus_per_rank": 1})) == []
    assert check(spec_of(train={**TRAIN, "precision": "tf32"}, resources={"gpus_per_rank": 1})) == []


@pytest.mark.parametrize(
    ("sections", "reported"),
    [
        ({"train": {"optimizer": ADAMW}}, ["train.steps: is missing, like train.epochs"]),
        (
            {"resources": {"nodes": 2, "min_nodes": 3}},
            ["resources.min_nodes: is 3, more than resources.nodes, 2"],
        ),
        (
            {"resources": {"nodes": 4, "min_nodes": 2}, "parallel": {"data": 4}},
            ["parallel.data: is 4, and resources.min_nodes lets the number of replicas change"],
        ),
        (
            {"resources": {"nodes": 3, "min_nodes": 2}, "train": {**TRAIN, "global_batch": 12}},
            [
                "resources.min_nodes: is 2, and no number of nodes below 3 fits: 2 nodes will not be used: 2 ranks x 4 "
                "samples (data.micro_batch) do not divide the 12 samples of a step"
            ],
        ),
        (
            {"resources": {"nodes": 4, "min_nodes": 3}, "parallel": {"pipeline": 4}},
            [
                "resources.min_nodes: is 3, and no number of nodes below 4 fits: 3 nodes will not be used: 4 ranks of "
                "a replica do not divide 3 ranks"
            ],
        ),
        ({"train": {**TRAIN, "epochs": 1}}, ["train.steps: cannot be combined with train.epochs"]),
        (
            {"train": {**TRAIN, "global_batch": 16}, "resources": {"ranks_per_node": 3}},
            ["train.global_batch: is 16 samples a step, which 3 ranks x 4 samples (data.micro_batch) do not divide"],
        ),
        (
            {"train": {**TRAIN, "schedule": {"warmup_steps": 101}}},
            ["train.schedule.warmup_steps: is 101, longer than the run of 100 steps"],
        ),
        (
            {"train": {**TRAIN, "optimizer": {"name": "sgd", "lr": 1.0, "nesterov": True}}},
            ["train.optimizer.nesterov: needs momentum"],
        ),
        (
            {"train": {**TRAIN, "precision": "bf16"}},
            ["train.precision: is bf16, which needs a GPU, and resources.gpus_per_rank is 0"],
        ),
        (
            {
                "train": {**TRAIN, "precision": "fp16"},
                "resources": {"gpus_per_rank": 1, "kernels": "onnxruntime"},
                "model": model(graphs={"train": "train.onnx"}),
            },
            [
                "train.precision: is fp16, which needs ortflow's kernels, and resources.kernels is onnxruntime",
                "train.precision: is fp16, and model.graphs.train is trained unchanged",
            ],
        ),
        (
            {"train": {**TRAIN, "offload": "optimizer"}},
            ["train.offload: is optimizer, and ranks on CPUs have the optimizer's state in the host's memory already"],
        ),
        (
            {
                "train": {"steps": 1, "optimizer": {"name": "sgd", "lr": 1.0}, "offload": "optimizer"},
                "resources": {"gpus_per_rank": 1},
                "model": model(graphs={"optimizer": "o.onnx"}),
            },
            [
                "train.offload: is optimizer, and model.graphs.optimizer updates all parameters together",
                "train.offload: is optimizer, and this optimizer keeps no state",
            ],
        ),
        (
            {
                "train": {**TRAIN, "offload": "optimizer"},
                "resources": {"gpus_per_rank": 1},
                "model": None,
                "trainer": {"name": "linear"},
            },
            ["train.offload: is optimizer, and the optimizer's state is that of the trainer linear"],
        ),
        ({"model": None}, ["model: is missing"]),
        ({"trainer": {"name": "other"}}, ["model: is for the trainer graph, and trainer.name is other"]),
        ({"trainer": {"options": {"a": 1}}}, ["trainer.options: the trainer graph has no options"]),
        (
            {"train": {**TRAIN, "evaluation": {"every_steps": 10}}},
            ["train.evaluation.every_steps: needs an evaluation set"],
        ),
        ({"train": {**TRAIN, "early_stop": {}}}, ["train.early_stop: needs an evaluation set"]),
        ({"data": EVAL, "train": {**TRAIN, "early_stop": {}}}, ["train.early_stop: needs periodic evaluation"]),
        (
            {
                "data": EVAL,
                "train": {**TRAIN, "early_stop": {"metric": "accuracy"}, "evaluation": {"every_steps": 10}},
            },
            ["train.early_stop.metric: is accuracy, which evaluation does not compute"],
        ),
        (
            {"model": model({"kind": "mse"}, metrics=["accuracy", "perplexity"])},
            [
                "model.metrics[0]: is accuracy, which is computed for the losses cross_entropy and bce_with_logits, not"
                " for mse",
                "model.metrics[1]: is perplexity, which is computed for the losses cross_entropy and output, not for"
                " mse",
            ],
        ),
        (
            {"model": model(recompute=["h.*"], graphs={"train": "train.onnx"})},
            ["model.recompute: applies to the training graph that ortflow builds, and model.graphs.train replaces it"],
        ),
        (
            {"model": model(metrics=["accuracy", "accuracy"])},
            ["model.metrics[1]: lists accuracy twice"],
        ),
        (
            {"model": model({"kind": "output", "output": "loss"}), "data": {**DATA, "last_batch": "pad"}},
            ["data.last_batch: cannot be pad if the loss is an output of the graph: the padding samples would count"],
        ),
        (
            {"data": {**EVAL, "train": {"path": "t", "columns": {"x": "tokens[1]"}}}},
            ["data.train.columns.x: 'tokens[1]' is neither a column nor a slice of one"],
        ),
        (
            {"data": {**DATA, "eval": {"path": "t", "columns": {"x": "tokens[a:b]"}}}},
            ["data.eval.columns.x: 'tokens[a:b]' is neither a column nor a slice of one"],
        ),
        (
            {"parallel": {"data": 3}, "resources": {"nodes": 2, "ranks_per_node": 2}},
            [
                "parallel.data: does not fit the world size: data 3 x pipeline 1 x horizontal 1 = 3, "
                "and resources has 2 x 2 = 4 ranks"
            ],
        ),
        (
            {"parallel": {"pipeline": 2}, "resources": {"ranks_per_node": 3}},
            [
                "parallel.pipeline: does not fit the world size: pipeline 2 x horizontal 1 = 2, "
                "and resources has 1 x 3 = 3 ranks",
            ],
        ),
        (
            {"parallel": {"horizontal": 2}, "resources": {"ranks_per_node": 2, "kernels": "onnxruntime"}},
            ["parallel.horizontal: is 2, and parts are summed by ortflow's kernels: resources.kernels is onnxruntime"],
        ),
        (
            {
                "parallel": {"horizontal": 2},
                "resources": {"ranks_per_node": 2},
                "model": model(graphs={"optimizer": "o.onnx", "train": "t.onnx", "eval": "e.onnx"}),
            },
            [
                f"parallel.horizontal: is 2, and model.graphs.{name} is of the whole model"
                for name in ("train", "eval", "optimizer")
            ],
        ),
        (
            {
                "parallel": {"pipeline": 2},
                "resources": {"ranks_per_node": 2},
                "model": None,
                "trainer": {"name": "linear"},
            },
            ["parallel.pipeline: is 2, and a model is divided by the trainer linear"],
        ),
        (
            {"parallel": {"pipeline": 2, "zero": 2}, "resources": {"ranks_per_node": 4}},
            [
                "parallel.zero: is 2, and a stage adds up the gradients of several micro-batches at a time: "
                "parallel.pipeline is 2"
            ],
        ),
        (
            {"parallel": {"schedule": "gpipe", "cuts": [["a"]]}},
            [
                *(f"parallel.{name}: is of a pipeline, and parallel.pipeline is 1" for name in ("schedule", "cuts")),
            ],
        ),
        (
            {"parallel": {"whole": ["a"], "columns": ["b"], "rows": ["c"]}},
            [
                f"parallel.{name}: names weights that the parts of a layer divide, and parallel.horizontal is 1"
                for name in ("whole", "columns", "rows")
            ],
        ),
        (
            {"parallel": {"sequence_parallel": True}},
            [
                "parallel.sequence_parallel: is true, and the tokens are divided among the parts of a layer: "
                "parallel.horizontal is 1"
            ],
        ),
        (
            {
                "parallel": {"horizontal": 2, "sequence_parallel": True},
                "resources": {"ranks_per_node": 2, "gpus_per_rank": 1},
            },
            [
                "parallel.sequence_parallel: is true, and ranks on GPUs cannot divide the tokens of a layer in this "
                "version: resources.gpus_per_rank is 1"
            ],
        ),
        (
            {"parallel": {"pipeline": 2, "chunks": 2}, "resources": {"ranks_per_node": 2}},
            ["parallel.chunks: is 2, and parallel.schedule is 1f1b"],
        ),
        (
            {"parallel": {"pipeline": 2, "schedule": "interleaved"}, "resources": {"ranks_per_node": 2}},
            ["parallel.chunks: is 1, and parallel.schedule is interleaved"],
        ),
        (
            {"parallel": {"pipeline": 2, "cuts": [["a"], ["b"]]}, "resources": {"ranks_per_node": 2}},
            ["parallel.cuts: has 2 cuts, and parallel.pipeline 2 needs 1"],
        ),
        (
            {"parallel": {"zero": 3}, "resources": {"kernels": "onnxruntime"}},
            ["parallel.zero: is 3, and parameters are fetched by ortflow's kernels: resources.kernels is onnxruntime"],
        ),
        (
            {"parallel": {"zero": 3, "pipeline": 2, "horizontal": 2}, "resources": {"ranks_per_node": 4}},
            [
                f"parallel.zero: is 3, which shards whole layers, and parallel.{name} is 2, which divides the model "
                "itself"
                for name in ("pipeline", "horizontal")
            ],
        ),
        (
            {"parallel": {"zero": 3}, "resources": {"gpus_per_rank": 1, "kernels": "onnxruntime"}},
            [
                "parallel.zero: is 3, and parameters are fetched by ortflow's kernels: resources.kernels is "
                "onnxruntime",
            ],
        ),
        (
            {"parallel": {"zero": 3}, "model": model(graphs={"optimizer": "o.onnx"})},
            ["parallel.zero: is 3, and model.graphs.optimizer updates all parameters together"],
        ),
        (
            {"parallel": {"zero": 3}, "model": model(graphs={"train": "t.onnx"})},
            [
                "parallel.zero: is 3, and gradients are sent by graphs that ortflow has made: "
                "model.graphs.train is given"
            ],
        ),
        (
            {"parallel": {"zero": 1}, "model": None, "trainer": {"name": "linear"}},
            ["parallel.zero: is 1, and sharding is defined by the trainer linear"],
        ),
        (
            {"parallel": {"zero": 1}, "model": model(graphs={"optimizer": "o.onnx"})},
            ["parallel.zero: is 1, and model.graphs.optimizer updates all parameters together"],
        ),
        (
            {"train": {**TRAIN, "sync_batch_norm": True}, "resources": {"gpus_per_rank": 1}},
            [
                "train.sync_batch_norm: is true, and graphs on GPUs cannot exchange values in this version: "
                "resources.gpus_per_rank is 1",
            ],
        ),
        (
            {"train": {**TRAIN, "sync_batch_norm": True}, "resources": {"kernels": "onnxruntime"}},
            [
                "train.sync_batch_norm: is true, and statistics are exchanged by ortflow's kernels: "
                "resources.kernels is onnxruntime",
            ],
        ),
        *(
            (
                {
                    "train": {**TRAIN, "sync_batch_norm": True},
                    "parallel": {name: 2},
                    "resources": {"ranks_per_node": 4},
                },
                [
                    "train.sync_batch_norm: is true, and statistics run over ranks that hold the whole model: "
                    f"parallel.{name} is 2",
                ],
            )
            for name in ("pipeline", "horizontal")
        ),
        (
            {"train": {**TRAIN, "sync_batch_norm": True}, "model": model(graphs={"train": "train.onnx"})},
            [
                "train.sync_batch_norm: is true, and statistics are exchanged by graphs that ortflow has made: "
                "model.graphs.train is given",
            ],
        ),
        (
            {"train": {**TRAIN, "sync_batch_norm": True}, "model": None, "trainer": {"name": "linear"}},
            ["train.sync_batch_norm: is true, and statistics are those of the trainer linear"],
        ),
        (
            {"train": {**TRAIN, "precision": "tf32"}},
            ["train.precision: is tf32, which needs a GPU, and resources.gpus_per_rank is 0"],
        ),
        (
            {"train": {**TRAIN, "loss_scale": 1024.0}},
            ["train.loss_scale: is 1024, and only training in fp16 scales its loss"],
        ),
        (
            {"resources": {"gpus_per_rank": 4}},
            ["resources.gpus_per_rank: is 4, and a rank uses at most one GPU"],
        ),
        (
            {"resources": {"gpu_type": "h100"}},
            ["resources.gpu_type: is h100, and resources.gpus_per_rank is 0"],
        ),
        ({"resources": {"memory": "lots"}}, ["resources.memory: 'lots' is not an amount of memory"]),
        ({"resources": {"time_limit": "soon"}}, ["resources.time_limit: 'soon' is not a duration"]),
        (
            {"restart": {"backoff": {"first": 10.0, "limit": 5.0}}},
            ["restart.backoff.first: is 10 seconds, longer than the limit of 5"],
        ),
        (
            {"checkpoint": {"directory": "../shared"}},
            ["checkpoint.directory: is outside the run directory (../shared)"],
        ),
        ({"checkpoint": {"directory": "."}}, ["checkpoint.directory: is ., which is reserved in the run directory"]),
        (
            {"monitor": {"tensorboard_directory": "logs/tb"}},
            ["monitor.tensorboard_directory: is logs/tb, which is reserved in the run directory"],
        ),
        ({"export": {"path": ".stop"}}, ["export.path: is .stop, which is reserved in the run directory"]),
        (
            {"export": {"path": "plan.json.damaged"}},
            ["export.path: is plan.json.damaged, which is reserved in the run directory"],
        ),
        (
            {"export": {"path": "checkpoints/step-00000012/manifest.json"}},
            ["export.path: is checkpoints/step-00000012/manifest.json, inside checkpoint.directory"],
        ),
        ({"export": {"path": "x" * 300}}, [f"export.path: contains a name of 300 bytes ({'x' * 20}…)"]),
        (
            {"backends": {"slurm": {"mpi": "none"}}, "resources": {"ranks_per_node": 2}},
            ["backends.slurm.mpi: is none, which starts 2 runs of one rank each"],
        ),
        (
            {"backends": {"kubernetes": {"env": {"ORTFLOW_JOB": "x"}}}},
            ["backends.kubernetes.env.ORTFLOW_JOB: is set by ortflow or the operator"],
        ),
        (
            {"export": {"path": "./checkpoints/"}},
            ["export.path: is ./checkpoints/, and so is checkpoint.directory"],
        ),
    ],
)
def test_a_contradiction(sections: dict[str, Any], reported: list[str]) -> None:
    assert [f"{dotted(problem.path)}: {problem.what}" for problem in check(spec_of(**sections))] == reported


def test_every_check_has_a_contradiction_that_it_alone_finds() -> None:
    marks = {mark.name: mark for mark in test_a_contradiction.pytestmark}  # type: ignore[attr-defined]
    specs = [spec_of(**sections) for sections, _ in marks["parametrize"].args[1]]
    for find in CHECKS:
        # What `_launchers` finds are the rules of packages: tests/integration/test_launcher_package.py.
        assert find.__name__ == "_launchers" or any(list(find(spec)) for spec in specs), find.__name__


def test_every_problem_gives_the_fix() -> None:
    marks = {mark.name: mark for mark in test_a_contradiction.pytestmark}  # type: ignore[attr-defined]
    for sections, _ in marks["parametrize"].args[1]:
        assert all(problem.fix for problem in check(spec_of(**sections)))
