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
    _fault("launchers/cause.py", "status < 0 and -status not in _LEAVE", "status < 0", "launcher_cause"),
    _fault(
        "launchers/budget.py",
        "used.failures > restart.failures",
        "used.failures >= restart.failures",
        "launcher_budget",
    ),
    _fault("launchers/records.py", 'and record.get("next") == "restart"', "", "launcher_budget"),
    _fault("launchers/liveness.py", "limit = max(self._limit, START)", "limit = self._limit", "launcher_liveness"),
    _fault("launchers/exits.py", "if rank not in self._order]", "]", "launcher_exits"),
    _fault(
        "launchers/supervisor.py",
        "agreed(ends_of(run, number",
        "None and agreed(ends_of(run, number",
        "launcher_supervisor",
    ),
    _fault("launchers/tail.py", "if self._lines.replaced and moment <= self._newest", "if False", "launcher_tail"),
    _fault("launchers/elastic.py", "if nodes <= present", "if nodes < present", "elastic"),
    _fault(
        "launchers/run_directory_lock.py",
        "if submission.fresh and not _empty(run)",
        "if submission.fresh",
        "launcher_run_directory_lock",
    ),
    _fault("launchers/sweeps.py", "[self.earlier :]", "[:]", "slurm_sweep"),
    _fault(
        "launchers/slurm/fit.py", "wanted.time > partition.max_time", "wanted.time < partition.max_time", "doctor_site"
    ),
    _fault(
        "launchers/kubernetes/reasons.py",
        'if scheduled.get("reason") == "SchedulingGated"',
        "if False",
        "kubernetes_client_status",
    ),
    _fault("launchers/remote/inputs.py", "0o755 if os.access(path, os.X_OK) else 0o644", "0o644", "remote_inputs"),
    # Manifests.
    _fault("manifests/local.py", "if not name.startswith(FOREIGN)", "", "launcher_request"),
    # The run file.
    _fault("workflow/spec/checks/check.py", "warmup > steps", "warmup > 2 * steps", "spec_check"),
    _fault(
        "workflow/spec/units.py", "(days * 24 + hours) * 60", "(days * 12 + hours) * 60", "spec_units", "manifest_slurm"
    ),
    _fault("workflow/spec/file/paths.py", "elif not os.access(path, os.R_OK)", "elif False", "spec_paths"),
    # The run directory and checkpoints.
    _fault("workflow/fence.py", "return self._location is None or self._location.intact()", "return False", "fence"),
    _fault("workflow/disk_space.py", "shutil.disk_usage(folder).free < needed", "False", "disk_space"),
    _fault(
        "workflow/plan.py", 'body.pop("hash", _hash(body)) != _hash(body)', 'body.pop("hash", "") == 1', "plan_file"
    ),
    _fault("workflow/layout.py", "return -(-count // ALIGNMENT) * ALIGNMENT", "return count", "core"),
    _fault("workflow/checkpoint/commit.py", "store.set_aside(step, attempt)", "pass", "checkpoint_commit"),
    _fault("workflow/checkpoint/verify.py", "if finished(hashing) != record.hash", "if False", "checkpoint_damage"),
    _fault("workflow/checkpoint/retain.py", "or step % every]", "or not step % every]", "checkpoint_retain"),
    _fault(
        "workflow/checkpoint/load.py",
        "yield first, last, place == 1",
        "yield first, last, place <= 1",
        "checkpoint_round_trip",
    ),
    _fault("workflow/checkpoint/reshape.py", "(first - span.start) * size", "first * size", "checkpoint_reshape"),
    _fault("workflow/checkpoint/manifest.py", 'body.get("version") != version', "False", "checkpoint_damage"),
    # Data.
    _fault("workflow/data/order.py", "_key(self._seed, epoch, 1)", "_key(self._seed, 0, 1)", "data_order"),
    _fault("workflow/data/batches.py", "return indices, last - first", "return indices, len(indices)", "data_batches"),
    # Optimizers and losses.
    _fault("workflow/optim/schedule.py", "shape = left**schedule.power", "shape = left", "optim_schedule"),
    _fault("workflow/optim/adam.py", "do_bias_correction=1", "do_bias_correction=0", "optimizers", "optim_graph"),
    _fault(
        "workflow/trainer/loss_scale.py", "self.value / 2, SMALLEST), good=0", "self.value / 2, SMALLEST)", "loss_scale"
    ),
    _fault(
        "workflow/graph/objective/loss.py",
        'loss = edit("Abs", edit("Sub", name, label))',
        'loss = edit("Sub", name, label)',
        "loss_graph",
        "graph_build_loss",
    ),
    # Graphs.
    _fault(
        "workflow/graph/autodiff/reductions.py",
        'b("Div", spread(b, b.gradient()), count)',
        "spread(b, b.gradient())",
        "autodiff_reductions",
    ),
    _fault(
        "workflow/graph/autodiff/convolutions.py", "fewer if upper else total - fewer", "fewer", "autodiff_convolutions"
    ),
    _fault("workflow/graph/normalize/fusions.py", "or value.any()", "", "graph_fusions"),
    _fault("workflow/graph/division/cut.py", "block * (part + 1) // parts", "block * part // parts + 1", "division"),
    _fault("workflow/graph/memory/plan.py", "last.get(name, -1) <= place", "last.get(name, -1) < place", "memory_plan"),
    # Kernels' buckets, ranks, pipelines, predictions.
    _fault(
        "workflow/fusion/buckets.py",
        "bucket=number if part_number == len(parts) - 1 else -1",
        "bucket=number",
        "buckets",
    ),
    _fault("workflow/planning/seconds.py", "if zero == 2 and count > 1", "if zero == 2 and count > 9", "planning"),
)
