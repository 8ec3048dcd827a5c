"""The faults: a file, a text that occurs in it once, what takes its place, and the tests that should find it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change of one line of the product."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    """Files below tests/."""


def _fault(file: str, before: str, after: str, *tests: str) -> Fault:
    return Fault(file, before, after, tuple(f"unit/test_{test}.py" for test in tests))


FAULTS = (
    # Launchers: stop, cause, budgets, records, locks.
    _fault("launchers/stop.py", "self.now = self.reason is not None", "self.now = True", "launcher_stop"),
    _fault("launchers/attempts/cause.py", "status < 0 and -status not in _LEAVE", "status < 0", "launcher_cause"),
    _fault(
        "launchers/budget.py",
        "used.failures > restart.failures",
        "used.failures >= restart.failures",
        "launcher_budget",
    ),
    _fault(
        "launchers/supervision/attempt_end.py",
        "agreed(ends_of(run, number",
        "None and agreed(ends_of(run, number",
        "launcher_supervisor",
    ),
    _fault(
        "launchers/run_directory_lock.py",
        "if submission.fresh and not _empty(run)",
        "if submission.fresh",
        "launcher_run_directory_lock",
    ),
    _fault(
        "launchers/slurm/fit.py",
        "request.time > partition.max_time",
        "request.time < partition.max_time",
        "doctor_site",
    ),
    _fault(
        "launchers/kubernetes/reasons.py",
        'if scheduled.get("reason") == "SchedulingGated"',
        "if False",
        "kubernetes_client_status",
    ),
    _fault("launchers/remote/inputs.py", "0o755 if os.access(path, os.X_OK) else 0o644", "0o644", "remote_inputs"),
    _fault("launchers/report/goodput.py", "- all_time) * inside // steps", "- all_time)", "report_goodput"),
    # Manifests.
    _fault("manifests/local.py", "if not name.startswith(FOREIGN)", "", "launcher_request"),
    # The run file.
    _fault("workflow/spec/checks/schedule.py", "warmup > steps", "warmup > 2 * steps", "spec_check"),
    _fault(
        "workflow/spec/units.py", "(days * 24 + hours) * 60", "(days * 12 + hours) * 60", "spec_units", "manifest_slurm"
    ),
    _fault("workflow/spec/file/paths.py", "elif not os.access(path, os.R_OK)", "elif False", "spec_paths"),
    # The run directory and checkpoints.
    _fault(
        "workflow/run/fence.py", "return self._location is None or self._location.intact()", "return False", "fence"
    ),
    _fault(
        "workflow/steps/run_plan.py",
        'body.pop("hash", _hash(body)) != _hash(body)',
        'body.pop("hash", "") == 1',
        "plan_file",
    ),
    _fault("workflow/layout.py", "return -(-count // ALIGNMENT) * ALIGNMENT", "return count", "core"),
    _fault("workflow/checkpoint/commit.py", "store.set_aside(step, attempt)", "pass", "checkpoint_commit"),
    _fault("workflow/checkpoint/verify.py", "if finished(hashing) != record.hash", "if False", "checkpoint_damage"),
    _fault(
        "workflow/checkpoint/load.py",
        "yield first, last, place == 1",
        "yield first, last, place <= 1",
        "checkpoint_round_trip",
    ),
    _fault("workflow/checkpoint/reshape.py", "(first - span.start) * size", "first * size", "checkpoint_reshape"),
    # Data.
    _fault("workflow/data/order.py", "_key(self._seed, epoch, 1)", "_key(self._seed, 0, 1)", "data_order"),
    _fault("workflow/data/batches.py", "return indices, last - first", "return indices, len(indices)", "data_batches"),
    _fault("workflow/data/mapped_arrays.py", "((int(start), part[name])", "((0, part[name])", "data_in_place"),
    _fault("workflow/data/tables/records.py", "np.searchsorted(quotes, ends) % 2 == 0", "ends >= 0", "data_tables"),
    # Weights, inference, sinks.
    _fault("workflow/weights/matching.py", "tensor_sources.pop(name, None)", "pass", "start_from"),
    _fault("workflow/inference/outputs.py", "reversed(array.shape[1:])", "array.shape[1:]", "inference_outputs"),
    _fault("workflow/sinks/delivery.py", "queue.Queue(MOST)", "queue.Queue()", "sinks"),
    # Training programs.
    _fault(
        "ortflow/program/order.py",
        "self.count, key_of(self._seed, epoch))",
        "self.count, key_of(self._seed, 0))",
        "program_sampler",
    ),
    _fault("workflow/program/agreement.py", "max(current.bounds)", "min(current.bounds)", "program_coordinator"),
    # Optimizers and losses.
    _fault("workflow/optim/schedule.py", "shape = remaining**schedule.power", "shape = remaining", "optim_schedule"),
    _fault("workflow/optim/adam.py", "do_bias_correction=1", "do_bias_correction=0", "optimizers", "optim_graph"),
    _fault(
        "workflow/trainer/loss_scale.py", "self.value / 2, SMALLEST), good=0", "self.value / 2, SMALLEST)", "loss_scale"
    ),
    _fault(
        "workflow/graph/objective/by_element.py",
        'return edit("Abs", difference)',
        "return difference",
        "loss_graph",
        "graph_build_loss",
    ),
    # Graphs.
    _fault(
        "workflow/graph/operators/reductions.py",
        'b("Div", spread(b, b.gradient()), count)',
        "spread(b, b.gradient())",
        "autodiff_reductions",
    ),
    _fault(
        "workflow/graph/operators/convolutions.py",
        "fewer if upper else total - fewer",
        "fewer",
        "autodiff_convolutions",
    ),
    _fault("workflow/graph/normalize/fusions.py", "or value.any()", "", "graph_fusions"),
    _fault("workflow/graph/rules/cut.py", "block * (part + 1) // parts", "block * part // parts + 1", "division"),
    _fault(
        "workflow/graph/memory/peak_memory.py",
        "last.get(name, -1) <= place",
        "last.get(name, -1) < place",
        "memory_plan",
    ),
    # Kernels' buckets, ranks, pipelines, predictions.
    _fault(
        "workflow/fusion/buckets.py",
        "bucket=number if part_number == len(parts) - 1 else -1",
        "bucket=number",
        "buckets",
    ),
    _fault("workflow/planning/seconds.py", "if zero == 2 and count > 1", "if zero == 2 and count > 9", "planning"),
)
