"""The rooms: modules and the tests that judge them, by folders of the product. A path of a test is below tests/."""

from __future__ import annotations


def _unit(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/test_{name}.py" for name in names)


_SUPERVISOR = _unit("launcher_supervisor", "launcher_liveness", "stop_full_disk")

ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "launchers": {
        "launchers/stop.py": _unit("launcher_stop", "stop_full_disk", "launcher_supervisor"),
        "launchers/attempts/cause.py": _unit("launcher_cause"),
        "launchers/budget.py": _unit("launcher_budget"),
        "launchers/supervision/exits.py": _unit("launcher_exits"),
        "launchers/attempts/liveness.py": _unit("launcher_liveness"),
        "launchers/supervision/supervisor.py": _SUPERVISOR,
        "launchers/supervision/attempt.py": _unit("launcher_attempt", "launcher_cause"),
        "launchers/supervision/supervised.py": _SUPERVISOR,
        "launchers/supervision/watch.py": _SUPERVISOR,
        "launchers/supervision/disk_wait.py": _SUPERVISOR,
    },
    "workflow/checkpoint": {
        "workflow/checkpoint/retain.py": _unit("checkpoint_retain"),
        "workflow/checkpoint/commit.py": _unit("checkpoint_commit", "checkpoint_damage", "checkpoint_retain"),
        "workflow/checkpoint/verify.py": _unit("checkpoint_damage", "checkpoint_cli"),
        "workflow/checkpoint/manifest.py": _unit("checkpoint_damage", "checkpoint_round_trip", "checkpoint_reshape"),
        "workflow/checkpoint/load.py": _unit("checkpoint_damage", "checkpoint_round_trip", "checkpoint_reshape"),
        "workflow/checkpoint/store.py": _unit("checkpoint_store", "checkpoint_commit", "checkpoint_retain"),
        "workflow/checkpoint/store_folder.py": _unit("checkpoint_store", "checkpoint_renamed"),
        "workflow/checkpoint/own_checkpoints.py": _unit("checkpoint_store", "checkpoint_of_a_program"),
        "workflow/checkpoint/program_save.py": _unit("checkpoint_of_a_program"),
        "workflow/checkpoint/tensors.py": _unit("checkpoint_tensors", "checkpoint_commit"),
        "workflow/checkpoint/writer.py": _unit("checkpoint_writer", "checkpoint_commit"),
        "workflow/checkpoint/image.py": _unit("checkpoint_image"),
        "workflow/checkpoint/reshape.py": _unit("checkpoint_reshape"),
        "workflow/checkpoint/identity.py": _unit("run_identity", "checkpoint_reshape"),
        "workflow/checkpoint/folder_lock.py": _unit("checkpoint_folder_lock"),
        "workflow/checkpoint/program.py": _unit("checkpoint_of_a_program"),
    },
    "workflow/spec/checks": {
        f"workflow/spec/checks/{name}.py": _unit("spec_check", *more)
        for name, *more in (
            ("batch", "batch_division"),
            ("check", "replicas", "metrics"),
            ("elastic", "elastic"),
            ("gpus", "spec_gpus"),
            ("nodes", "elastic"),
            ("parallel", "replicas"),
            ("sync",),
            ("slurm", "spec_slurm", "manifest_slurm"),
            ("slurm_flags", "spec_slurm"),
            ("slurm_syntax", "spec_slurm"),
            ("kubernetes", "kubernetes_spec", "kubernetes_validate"),
            ("kubernetes_syntax", "kubernetes_spec", "kubernetes_validate"),
        )
    }
    | {
        "workflow/spec/checks/kubernetes_native.py": _unit("kubernetes_native"),
        "workflow/spec/checks/program.py": _unit("program_spec"),
    },
    "workflow/data": {
        "workflow/data/order.py": _unit("data_order", "data_batches"),
        "workflow/data/batches.py": _unit("data_batches", "prefetch"),
        "workflow/data/epoch_positions.py": _unit("data_batches"),
        "workflow/data/ahead.py": _unit("data_ahead"),
        "workflow/data/digest.py": _unit("data_digest"),
        "workflow/data/check.py": _unit("data_check"),
        "workflow/data/convert.py": _unit("data_convert"),
        "workflow/data/arrays.py": _unit("data_set", "data_convert"),
        "workflow/data/dataset.py": _unit("data_set"),
        "workflow/data/inputs.py": _unit("data_check", "tokens"),
        "workflow/data/feed.py": _unit("data_feed", "data_check"),
        "workflow/data/scan.py": _unit("data_scan"),
        "workflow/data/schema.py": _unit("data_set", "data_check"),
        "workflow/data/source_formats.py": _unit("source_formats", "data_convert"),
        "workflow/data/text.py": _unit("data_text", "data_convert"),
        "workflow/data/write.py": _unit("data_set", "data_digest", "data_convert"),
    },
    "workflow/optim": {
        "workflow/optim/schedule.py": _unit("optim_schedule"),
        "workflow/optim/sgd.py": _unit("optim_graph"),
        "workflow/optim/adam.py": _unit("optim_graph", "optimizers"),
        "workflow/optim/lamb.py": _unit("optim_graph", "optimizers"),
        "workflow/optim/lamb_shares.py": _unit("zero", "queued_zero"),
        "workflow/optim/gradient.py": _unit("optim_gradient_queued", "optim_gradient"),
        "workflow/optim/guard.py": _unit("optim_guard"),
        "workflow/optim/segments.py": _unit("optim_segments"),
        "workflow/optim/after_step.py": _unit("queued_ahead", "loss_scale"),
        "workflow/optim/whole_tensors.py": _unit("optim_whole_tensors"),
        "workflow/optim/builder.py": _unit("optim_builder", "optim_graph"),
        "workflow/optim/graph.py": _unit("optim_graph"),
    },
    "workflow/graph/autodiff": {
        f"workflow/graph/autodiff/{name}.py": _unit(*tests)
        for name, *tests in (
            ("sizes", "autodiff_sizes"),
            ("branches", "autodiff_branches"),
            ("reverse", "autodiff_graphs"),
            ("path", "graph_intake_path"),
            ("expand", "graph_intake_path", "autodiff_branches"),
            ("compose", "graph_fold", "autodiff_dropout"),
            ("steep", "autodiff_steep"),
            ("choices", "graph_choices"),
            ("branch_models", "autodiff_branches"),
        )
    },
    "workflow/graph/operators": {
        f"workflow/graph/operators/{name}.py": _unit(*tests)
        for name, *tests in (
            ("activations", "autodiff_activations", "division"),
            ("elementwise", "autodiff_elementwise", "division"),
            ("unary", "autodiff_unary", "autodiff_activations"),
            ("by_element", "division", "division_sequence"),
            ("reductions", "autodiff_reductions", "autodiff_defaults", "division"),
            ("shaping", "autodiff_shaping", "autodiff_defaults", "division"),
            ("joins", "autodiff_shaping", "division"),
            ("rearrangements", "autodiff_shaping"),
            ("slicing", "autodiff_slicing", "division"),
            ("linear", "autodiff_linear", "autodiff_defaults", "division"),
            ("indexing", "autodiff_indexing", "autodiff_defaults"),
            ("norms", "autodiff_norms", "autodiff_defaults", "graph_rms", "division_sequence"),
            ("softmax", "autodiff_norms", "autodiff_defaults", "division"),
            ("channel_norms", "autodiff_channel_norms", "autodiff_defaults", "kernels_images"),
            ("group_norm", "graph_group_norm", "graph_rms"),
            ("pooling", "autodiff_pooling", "autodiff_defaults", "kernels_images"),
            ("convolutions", "autodiff_convolutions", "autodiff_defaults", "kernels_images"),
            ("selections", "autodiff_selections", "division"),
            ("spectral", "autodiff_spectral"),
            ("dropout", "autodiff_dropout"),
            ("recurrent", "autodiff_recurrent"),
            ("collectives", "sync_batch_norm", "division"),
            ("windows", "autodiff_pooling", "autodiff_convolutions"),
        )
    },
}
