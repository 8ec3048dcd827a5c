"""Checks across sections."""

from __future__ import annotations

from typing import Any

import pytest
from messages import alike
from run_files import spec_of

from ortflow.workflow.spec.checks.check import CHECKS, OF_TRAINERS, check
from ortflow.workflow.spec.problem import dotted

ADAMW = {"name": "adamw", "lr": 0.001}
TRAIN = {"steps": 100, "optimizer": ADAMW}
DATA = {"train": {"path": "t.arrow"}, "micro_batch": 4}
MAIL = {"host": "smtp", "sender": "ortflow@example.org", "to": ["me@example.org"]}
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
    fixed = {"nodes": 4, "min_nodes": 4}
    assert check(spec_of(resources=fixed)) == check(spec_of(resources=fixed, parallel={"data": 4})) == []
    for stage in (1, 2, 3):
        assert check(spec_of(parallel={"zero": stage}, resources={"ranks_per_node": 3})) == []
        train = {**TRAIN, "offload": "optimizer"}
        assert check(spec_of(parallel={"zero": stage}, train=train, resources={"gpus_per_rank": 1})) == []
        assert check(spec_of(parallel={"zero": stage}, resources={"ranks_per_node": 3, "gpus_per_rank": 1})) == []
    shares = {"horizontal": 2, "sequence_parallel": True}
    for layout in ({"pipeline": 2}, {"horizontal": 2}, {"pipeline": 2, "zero": 1}, shares, {**shares, "pipeline": 2}):
        assert check(spec_of(parallel=layout, resources={"ranks_per_node": 4, "gpus_per_rank": 1})) == []
    assert check(spec_of(train={**TRAIN, "precision": "tf32"}, resources={"gpus_per_rank": 1})) == []


@pytest.mark.parametrize(
    ("sections", "reported"),
    [
        ({"train": {"optimizer": ADAMW}}, ["train.steps: is missing … train.epochs … one of them"]),
        (
            {"resources": {"nodes": 2, "min_nodes": 3}},
            ["resources.min_nodes: … 3 … resources.nodes, 2 … at most 2"],
        ),
        (
            {"resources": {"nodes": 4, "min_nodes": 2}, "parallel": {"data": 4}},
            ["parallel.data: … 4 … resources.min_nodes … remove"],
        ),
        (
            {"resources": {"nodes": 3, "min_nodes": 2}, "train": {**TRAIN, "global_batch": 12}},
            [
                "resources.min_nodes: … 2 … below 3 … 2 nodes … 2 ranks x 4 samples (data.micro_batch) … 12 "
                "… train.global_batch"
            ],
        ),
        (
            {"resources": {"nodes": 4, "min_nodes": 3}, "parallel": {"pipeline": 4}},
            ["resources.min_nodes: … 3 … below 4 … 3 nodes … 4 ranks of a replica … 3 ranks … remove"],
        ),
        (
            {
                "resources": {"nodes": 5, "min_nodes": 2},
                "train": {**TRAIN, "global_batch": 100},
                "data": {**DATA, "micro_batch": 20},
            },
            ["resources.min_nodes: … 2 … below 5 … 2 nodes … 3 nodes … 4 nodes … train.global_batch"],
        ),
        (
            {"resources": {"nodes": 3, "min_nodes": 2}, "train": {**TRAIN, "global_batch": 8}},
            ["train.global_batch: … 8 … 3 ranks x 4 samples (data.micro_batch) … train.global_batch=12"],
        ),
        ({"train": {**TRAIN, "epochs": 1}}, ["train.steps: … train.epochs … train.epochs=null"]),
        (
            {"train": {**TRAIN, "global_batch": 16}, "resources": {"ranks_per_node": 3}},
            [
                "train.global_batch: … 16 … 3 ranks x 4 samples (data.micro_batch) … 2 ranks or 4 ranks "
                "… train.global_batch=12 or train.global_batch=24"
            ],
        ),
        (
            {"train": {**TRAIN, "schedule": {"warmup_steps": 101}}},
            ["train.schedule.warmup_steps: … 101 … 100 steps … at most 100"],
        ),
        (
            {"train": {**TRAIN, "optimizer": {"name": "lion", "lr": 1.0, "betas": [0.9, 0.0]}}},
            ["train.optimizer.betas[1]: is 0 … above 0; give a number such as 0.99"],
        ),
        (
            {"train": {**TRAIN, "groups": [{"match": ["a"]}]}},
            ["train.groups[0]: changes nothing; give lr, lr_scale, weight_decay or frozen_until"],
        ),
        (
            {"train": {**TRAIN, "average": {"name": "ema", "every": "often"}}},
            ["train.average.every: 'often' is not a duration; write a number with a unit, such as 500 steps …"],
        ),
        (
            {"train": {**TRAIN, "optimizer": {"name": "sgd", "lr": 1.0, "nesterov": True}}},
            ["train.optimizer.nesterov: needs momentum … train.optimizer.momentum"],
        ),
        (
            {"train": {**TRAIN, "precision": "bf16"}},
            ["train.precision: … bf16 … GPU … resources.gpus_per_rank is 0 … fp32"],
        ),
        (
            {
                "train": {**TRAIN, "precision": "fp16"},
                "resources": {"gpus_per_rank": 1, "kernels": "onnxruntime"},
                "model": model(graphs={"train": "train.onnx"}),
            },
            [
                "train.precision: … fp16 … resources.kernels is onnxruntime … auto",
                "train.precision: … fp16 … model.graphs.train … fp32 or tf32",
            ],
        ),
        (
            {"train": {**TRAIN, "offload": "optimizer"}},
            ["train.offload: … optimizer … CPUs … set it to none"],
        ),
        (
            {
                "train": {"steps": 1, "optimizer": {"name": "sgd", "lr": 1.0}, "offload": "optimizer"},
                "resources": {"gpus_per_rank": 1},
                "model": model(graphs={"optimizer": "o.onnx"}),
            },
            [
                "train.offload: … optimizer … model.graphs.optimizer … set it to none",
                "train.offload: … optimizer … no state … set it to none",
            ],
        ),
        (
            {
                "train": {**TRAIN, "offload": "optimizer"},
                "resources": {"gpus_per_rank": 1},
                "model": None,
                "trainer": {"name": "linear"},
            },
            ["train.offload: … optimizer … trainer linear … set it to none"],
        ),
        *(
            (
                {
                    "train": {**TRAIN, "offload": "optimizer"},
                    "resources": {"gpus_per_rank": 1, "ranks_per_node": 2},
                    "parallel": {degree: 2},
                },
                ["train.offload: … optimizer … divided model … set it to none"],
            )
            for degree in ("pipeline", "horizontal")
        ),
        ({"model": None}, ["model: is missing … add it"]),
        ({"trainer": {"name": "other"}}, ["model: … trainer graph … trainer.name is other … remove one"]),
        ({"trainer": {"options": {"a": 1}}}, ["trainer.options: … graph has no options … remove"]),
        (
            {"train": {**TRAIN, "evaluation": {"every_steps": 10}}},
            ["train.evaluation.every_steps: … evaluation set … data.eval"],
        ),
        ({"train": {**TRAIN, "early_stop": {}}}, ["train.early_stop: … evaluation set … data.eval"]),
        (
            {"data": EVAL, "train": {**TRAIN, "early_stop": {}}},
            ["train.early_stop: … periodic evaluation … train.evaluation.every_steps"],
        ),
        (
            {
                "data": EVAL,
                "train": {**TRAIN, "early_stop": {"metric": "accuracy"}, "evaluation": {"every_steps": 10}},
            },
            ["train.early_stop.metric: … accuracy … add accuracy to model.metrics"],
        ),
        (
            {"model": model({"kind": "mse"}, metrics=["accuracy", "perplexity"])},
            [
                "model.metrics[0]: … accuracy … numbers of classes or targets … values … remove",
                "model.metrics[1]: … perplexity … cross_entropy and output … mse … remove",
            ],
        ),
        (
            {"model": model(recompute=["h.*"], graphs={"train": "train.onnx"})},
            ["model.recompute: … model.graphs.train … remove one"],
        ),
        (
            {"model": model(lora={"match": ["*"]}, graphs={"train": "train.onnx"})},
            ["model.lora: … model.graphs.train … remove one"],
        ),
        (
            {"model": model(metrics=["accuracy", "accuracy"])},
            ["model.metrics[1]: … accuracy twice … keep one"],
        ),
        (
            {"model": model({"kind": "output", "output": "loss"}), "data": {**DATA, "last_batch": "pad"}},
            ["data.last_batch: … pad … output of the graph … drop or keep"],
        ),
        (
            {"data": {**EVAL, "train": {"path": "t", "columns": {"x": "tokens[1]"}}}},
            ["data.train.columns.x: 'tokens[1]' … column[a:b]"],
        ),
        (
            {"data": {**DATA, "eval": {"path": "t", "columns": {"x": "tokens[a:b]"}}}},
            ["data.eval.columns.x: 'tokens[a:b]' … column[a:b]"],
        ),
        (
            {"parallel": {"data": 3}, "resources": {"nodes": 2, "ranks_per_node": 2}},
            ["parallel.data: … data 3 x pipeline 1 x horizontal 1 = 3 … 2 x 2 = 4 ranks … change"],
        ),
        (
            {"parallel": {"pipeline": 2}, "resources": {"ranks_per_node": 3}},
            [
                "parallel.pipeline: … pipeline 2 x horizontal 1 = 2 … 1 x 3 = 3 ranks … change",
            ],
        ),
        (
            {"parallel": {"horizontal": 2}, "resources": {"ranks_per_node": 2, "kernels": "onnxruntime"}},
            ["parallel.horizontal: … 2 … resources.kernels is onnxruntime … 1 … auto"],
        ),
        (
            {
                "parallel": {"horizontal": 2},
                "resources": {"ranks_per_node": 2},
                "model": model(graphs={"optimizer": "o.onnx", "train": "t.onnx", "eval": "e.onnx"}),
            },
            [f"parallel.horizontal: … 2 … model.graphs.{name} … remove one" for name in ("train", "eval", "optimizer")],
        ),
        (
            {
                "parallel": {"pipeline": 2},
                "resources": {"ranks_per_node": 2},
                "model": None,
                "trainer": {"name": "linear"},
            },
            ["parallel.pipeline: … 2 … trainer linear … set it to 1"],
        ),
        (
            {"parallel": {"pipeline": 2, "zero": 2}, "resources": {"ranks_per_node": 4}},
            ["parallel.zero: … 2 … parallel.pipeline is 2 … set it to 1"],
        ),
        (
            {"parallel": {"schedule": "gpipe", "cuts": [["a"]]}},
            [
                *(f"parallel.{name}: … parallel.pipeline is 1 … remove" for name in ("schedule", "cuts")),
            ],
        ),
        (
            {"parallel": {"whole": ["a"], "columns": ["b"], "rows": ["c"]}},
            [
                f"parallel.{name}: … parallel.horizontal is 1 … horizontal above 1"
                for name in ("whole", "columns", "rows")
            ],
        ),
        (
            {"parallel": {"sequence_parallel": True}},
            ["parallel.sequence_parallel: … true … parallel.horizontal is 1 … horizontal above 1"],
        ),
        (
            {"parallel": {"pipeline": 2, "chunks": 2}, "resources": {"ranks_per_node": 2}},
            ["parallel.chunks: … 2 … parallel.schedule is 1f1b … interleaved"],
        ),
        (
            {"parallel": {"pipeline": 2, "schedule": "interleaved"}, "resources": {"ranks_per_node": 2}},
            ["parallel.chunks: … 1 … parallel.schedule is interleaved … chunks above 1"],
        ),
        (
            {"parallel": {"pipeline": 2, "cuts": [["a"], ["b"]]}, "resources": {"ranks_per_node": 2}},
            ["parallel.cuts: … 2 cuts … parallel.pipeline 2 needs 1 … one cut between"],
        ),
        (
            {"parallel": {"zero": 3}, "resources": {"kernels": "onnxruntime"}},
            ["parallel.zero: … 3 … resources.kernels is onnxruntime … 2 … auto"],
        ),
        (
            {"parallel": {"zero": 3, "pipeline": 2, "horizontal": 2}, "resources": {"ranks_per_node": 4}},
            [f"parallel.zero: … 3 … parallel.{name} is 2 … set it to 1" for name in ("pipeline", "horizontal")],
        ),
        (
            {"parallel": {"zero": 3}, "resources": {"gpus_per_rank": 1, "kernels": "onnxruntime"}},
            ["parallel.zero: … 3 … kernels … resources.kernels is onnxruntime"],
        ),
        (
            {"parallel": {"zero": 3}, "model": model(graphs={"optimizer": "o.onnx"})},
            ["parallel.zero: … 3 … model.graphs.optimizer … remove one"],
        ),
        (
            {"parallel": {"zero": 3}, "model": model(graphs={"train": "t.onnx"})},
            ["parallel.zero: … 3 … model.graphs.train … set it to 2"],
        ),
        (
            {"parallel": {"zero": 1}, "model": None, "trainer": {"name": "linear"}},
            ["parallel.zero: … 1 … trainer linear … set it to 0"],
        ),
        (
            {"parallel": {"zero": 1}, "model": model(graphs={"optimizer": "o.onnx"})},
            ["parallel.zero: … 1 … model.graphs.optimizer … remove one"],
        ),
        (
            {"train": {**TRAIN, "sync_batch_norm": True}, "resources": {"gpus_per_rank": 1}},
            [
                "train.sync_batch_norm: … true … resources.gpus_per_rank is 1 … false",
            ],
        ),
        (
            {"train": {**TRAIN, "sync_batch_norm": True}, "resources": {"kernels": "onnxruntime"}},
            [
                "train.sync_batch_norm: … true … resources.kernels is onnxruntime … false … auto",
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
                    f"train.sync_batch_norm: … true … parallel.{name} is 2 … false",
                ],
            )
            for name in ("pipeline", "horizontal")
        ),
        (
            {"train": {**TRAIN, "sync_batch_norm": True}, "model": model(graphs={"train": "train.onnx"})},
            [
                "train.sync_batch_norm: … true … model.graphs.train … remove one",
            ],
        ),
        (
            {"train": {**TRAIN, "sync_batch_norm": True}, "model": None, "trainer": {"name": "linear"}},
            ["train.sync_batch_norm: … true … trainer linear … false"],
        ),
        (
            {"train": {**TRAIN, "precision": "tf32"}},
            ["train.precision: … tf32 … GPU … resources.gpus_per_rank is 0 … fp32"],
        ),
        (
            {"train": {**TRAIN, "loss_scale": 1024.0}},
            ["train.loss_scale: … 1024 … fp16 … leave it out"],
        ),
        (
            {"resources": {"gpus_per_rank": 4}},
            ["resources.gpus_per_rank: … 4 … one GPU … set it to 1 … resources.ranks_per_node"],
        ),
        (
            {"resources": {"gpu_type": "h100"}},
            ["resources.gpu_type: … h100 … resources.gpus_per_rank is 0 … resources.gpus_per_rank to 1"],
        ),
        ({"resources": {"memory": "lots"}}, ["resources.memory: 'lots' … memory … 16G"]),
        ({"resources": {"time_limit": "soon"}}, ["resources.time_limit: 'soon' … duration … hours:minutes:seconds"]),
        (
            {"restart": {"backoff": {"first": 10.0, "limit": 5.0}}},
            ["restart.backoff.first: … 10 seconds … limit of 5 … raise the limit"],
        ),
        (
            {"checkpoint": {"directory": "../shared"}},
            ["checkpoint.directory: … outside … (../shared) … inside"],
        ),
        ({"checkpoint": {"directory": "."}}, ["checkpoint.directory: is . … reserved … another name"]),
        (
            {"monitor": {"tensorboard_directory": "logs/tb"}},
            ["monitor.tensorboard_directory: … logs/tb … reserved … another name"],
        ),
        (
            {"monitor": {"notify": [{"on": ["failed"]}]}},
            ["monitor.notify[0]: needs a command, a webhook or a mail; give one of them"],
        ),
        (
            {"monitor": {"notify": [{"on": ["failed"], "command": ["a"], "webhook": "ftp://a"}]}},
            ["monitor.notify[0]: has command and webhook … one", "monitor.notify[0].webhook: … URL … https"],
        ),
        (
            {"monitor": {"notify": [{"on": ["failed"], "mail": {**MAIL, "user": "me", "security": "none"}}]}},
            [
                "monitor.notify[0].mail: … no password … me … password_variable … password_file",
                "monitor.notify[0].mail.security: … unencrypted … starttls",
            ],
        ),
        (
            {"monitor": {"notify": [{"on": ["failed"], "mail": {**MAIL, "password_file": "secret"}}]}},
            [
                "monitor.notify[0].mail.password_file: … without a user … user",
                "monitor.notify[0].mail.password_file: … relative (secret) … absolute",
            ],
        ),
        (
            {"monitor": {"profile": {"from": 5, "to": 4}}},
            ["monitor.profile.to: is 4, before … step 5; give at least 5"],
        ),
        ({"monitor": {"profile": {"from": 5, "to": 1005}}}, ["monitor.profile.to: records 1001 steps; … at most 1004"]),
        ({"export": {"path": ".stop"}}, ["export.path: … .stop … reserved … another name"]),
        (
            {"export": {"path": "plan.json.damaged"}},
            ["export.path: … plan.json.damaged … reserved … another name"],
        ),
        (
            {"export": {"path": "checkpoints/step-00000012/manifest.json"}},
            ["export.path: … checkpoints/step-00000012/manifest.json … inside checkpoint.directory … beside it"],
        ),
        ({"export": {"path": "x" * 300}}, [f"export.path: … 300 bytes … {'x' * 20} … 255"]),
        (
            {"backends": {"slurm": {"mpi": "none"}}, "resources": {"ranks_per_node": 2}},
            ["backends.slurm.mpi: … none … 2 runs … auto, pmi2 (MPICH), pmix (Open MPI) or mpirun"],
        ),
        (
            {"backends": {"kubernetes": {"env": {"ORTFLOW_JOB": "x"}}}},
            ["backends.kubernetes.env.ORTFLOW_JOB: … set by ortflow … leave it out"],
        ),
        (
            {"data": {**DATA, "eval": {"path": "other", "fraction": 0.1, "group": "a", "time": "b"}}},
            [
                "data.eval.path: … data.train.path … data.eval.fraction … one of them",
                "data.eval.time: … data.eval.group … one of them",
            ],
        ),
        (
            {"data": {**DATA, "eval": {"path": "other", "stratify": "a"}}},
            ["data.eval.stratify: … share … data.eval.fraction"],
        ),
        (
            {"data": {**DATA, "eval": {"fraction": 0.0}}},
            ["data.eval.fraction: is 0 … 0.1"],
        ),
        (
            {
                "data": {
                    **DATA,
                    "train": {
                        "path": "t",
                        "fields": [{"columns": ["a"], "standardize": True, "std": 2.0, "one_hot": True}],
                    },
                }
            },
            [
                "data.train.fields[0].standardize: … one_hot … one of them",
                "data.train.fields[0].std: … standardize … one of them",
            ],
        ),
        (
            {"tune": {"space": {"seed": [1, 2]}, "trials": 2}},
            ["tune: needs an evaluation set; give data.eval"],
        ),
        (
            {"monitor": {"profile": {"from": 9, "to": 4}}},
            ["monitor.profile.to: is 4, before the first step 9; give at least 9"],
        ),
        (
            {"monitor": {"profile": {"from": 9, "to": 5000}}},
            ["monitor.profile.to: records 4992 steps; give at most 1008; 10 steps are enough"],
        ),
        (
            {"export": {"path": "./checkpoints/"}},
            ["export.path: … ./checkpoints/ … checkpoint.directory … different"],
        ),
        (
            {"data": EVAL, "tune": {"space": {"seed": {"log_integer": [1, 9]}}, "sampler": "grid"}},
            ["tune.space.seed: … range … list"],
        ),
    ],
)
def test_a_contradiction(sections: dict[str, Any], reported: list[str]) -> None:
    found = [f"{dotted(problem.path)}: {problem.what}; {problem.fix}" for problem in check(spec_of(**sections))]
    assert alike(found, reported)


def test_every_check_has_a_contradiction_that_it_alone_finds() -> None:
    marks = {mark.name: mark for mark in test_a_contradiction.pytestmark}  # type: ignore[attr-defined]
    specs = [spec_of(**sections) for sections, _ in marks["parametrize"].args[1]]
    for find in (*OF_TRAINERS, *CHECKS):
        # What `_launchers` finds are the rules of packages: tests/integration/test_launcher_package.py.
        # Those of `check_program` are in test_program_spec.py, and of `check_transforms` in test_transforms.py.
        assert find.__name__ in ("_launchers", "check_program", "check_transforms") or any(
            list(find(spec)) for spec in specs
        ), find.__name__


def test_every_problem_gives_the_fix() -> None:
    marks = {mark.name: mark for mark in test_a_contradiction.pytestmark}  # type: ignore[attr-defined]
    for sections, _ in marks["parametrize"].args[1]:
        assert all(problem.fix for problem in check(spec_of(**sections)))
