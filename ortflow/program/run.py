"""Level 2: a loop over `Run.steps` whose state, position and random numbers are saved and restored."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ortflow.program import engines, part, random_states, registry, storage
from ortflow.program.boundary import Boundary
from ortflow.program.errors import ProgramError
from ortflow.program.loaders import Feed
from ortflow.program.part import Context

if TYPE_CHECKING:
    from pathlib import Path

Batch = TypeVar("Batch")
EXIT_STOPPED_ALONE = 75
"""Exit code of a program without ortflow that was asked to stop and has saved; with ortflow its rank returns it."""


class Run(Context):
    """A program's part in its run, with the registered objects, which are those of the newest checkpoint.

    `position` is the number of steps done, and `epoch` the number of passes over the loader that are complete.
    """

    def __init__(self, base: Context, objects: dict[str, Any]) -> None:
        super().__init__(base._link, base._checks, base._place)
        if base._tracer is not None:
            base._tracer.close()  # steps are seen by `steps`
        self.epoch = 0
        self._objects = registry.checked(objects)
        self._drawn = self._empty_passes = 0
        self._epochs: int | None = None
        self._scaler_looked_for = False
        self._feed: Feed | None = None
        self._resumed: dict[str, Any] | None = None
        self._saved_position: int | None = None
        self._of_level_one: Path | None = None
        self._checked_position: int | None = None
        measures = self._link is not None and self.rank == 0
        self._boundary = Boundary(self._period, self._ask_to_save if measures else None)
        for value in self._objects.values():
            if registry.is_optimizer(value):
                self._boundary.watch(value)
            elif engines.is_engine(value):
                self._boundary.wait_for(partial(engines.is_between_updates, value))
        self._load()

    def _ask_to_save(self) -> None:
        self._tell({"kind": "save_requested"})

    def _load(self) -> None:
        path = self.latest()
        if path is None:
            return
        if not self._objects and not storage.is_of_level_two(path):
            self._of_level_one = path  # the program loads it by itself
            return
        try:
            content = storage.read(path, self._place)
            self._check_names(content["objects"])
            present = {name: value for name, value in self._objects.items() if name in content["objects"]}
            storage.load(path, content, present, self._place)
        except ProgramError as error:
            self._reject(path, str(error))
            raise
        self._resumed = content
        self.position = self._saved_position = content["step"]
        self.epoch = content["loader"]["epoch"]
        if self._link is None and self.rank == 0:
            print(f"ortflow: resumed after step {self.position} from {path}", file=sys.stderr)

    def _reject(self, path: Path, reason: str) -> None:
        self._tell({"kind": "rejected", "step": int(path.name.rpartition("-")[2]), "reason": reason})

    def _check_names(self, saved: dict[str, Any]) -> None:
        missing = sorted(set(self._objects) - set(saved))
        unknown = sorted(set(saved) - set(self._objects) - {registry.SCALER})
        if missing or unknown:
            raise ProgramError(
                f"start() was called with {', '.join(sorted(self._objects))}, and the checkpoint has the state of "
                f"{', '.join(sorted(saved))}: register the same objects, or begin without the checkpoint"
            )

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are not complete, below `count`; inside, `steps` makes one pass each."""
        self._epochs = count
        while self.epoch < count:
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:
                raise ProgramError(
                    "a loop over run.epochs needs one complete loop over run.steps(loader) in each epoch"
                )

    def steps(self, loader: Iterable[Batch], *, total: int | None = None) -> Iterator[Batch]:
        """Yield batches, one a step, from the run's position until `total` steps of the run are done.

        The passes over the loader follow each other; without `total`, one pass. Between two steps the run saves if
        that is due. If it is asked to stop, it saves and raises SystemExit, because what follows the loop is for a
        complete training.
        """
        if self._of_level_one is not None:
            raise ProgramError(storage.not_of_level_two(self._of_level_one))
        if total is not None:
            self.total = total
            if self._complete(total):
                return
        batches = self._begin(loader, total)
        while total is None or self.position < total:
            self._between()
            if self._profiler is not None:
                self._profiler.begin(self.position + 1)
            try:
                batch = next(batches)
            except StopIteration:
                if total is None and self._epochs in (None, self.epoch + 1) and self._saved_position != self.position:
                    self._save()
                self._end_pass()
                if total is None:
                    if self._tracer is not None:
                        self._tracer.before(self.position, None, self._objects)
                    return
                batches = self._begin(loader, total)
                continue
            if self._tracer is not None:
                self._tracer.before(self.position, batch, self._objects)
            if self._profiler is not None:
                self._profiler.drawn()
            self._in_step = 1
            try:
                yield batch
            finally:
                self._in_step = 0
            self.position += 1
            self._drawn += 1
            if self._profiler is not None:
                self._profiler.done(self.position)
        if self._profiler is not None:
            self._profiler.end(self.position)
        self._between()
        if self._saved_position != self.position:
            self._save()
        if self._tracer is not None:
            self._tracer.before(self.position, None, self._objects)

    def _begin(self, loader: Any, total: int | None) -> Iterator[Any]:
        if self._feed is None or self._feed.loader is not loader:
            self._feed = Feed(loader, self._place, origin=self.position)
        self._find_scaler()
        resumed = self._resumed
        if resumed is None:
            if self._empty_passes > 1:
                raise ProgramError("run.steps: the loader gives no batches")
            self._drawn = 0
            return self._feed.begin(self.position, self.epoch)
        self._resumed = None
        try:
            batches = self._feed.resume(resumed["loader"], self.position, resumed["world_size"])
        except ProgramError as error:
            self._tell({"kind": "rejected", "step": self.position, "reason": str(error)})
            raise
        self._drawn = resumed["loader"]["drawn"]
        random_states.restore(resumed["random"])
        return batches

    def _complete(self, total: int) -> bool:
        """Whether a loop was complete before the checkpoint or with it; the random states are then those of its end."""
        resumed = self._resumed
        if resumed is None or self.position < total:
            return False
        if resumed["total"] == total:
            random_states.restore(resumed["random"])
            self._resumed = None
        return True

    def _end_pass(self) -> None:
        self._empty_passes = 0 if self._drawn else self._empty_passes + 1
        # A loader that was saved at its end may end once more before it begins anew.
        self.epoch += self._drawn > 0
        self._drawn = 0

    def _between(self) -> None:
        """Save or end where that is due. Once at each position: the number of checks is then the same on every rank."""
        if self.position == self._checked_position:
            return
        self._checked_position = self.position
        if self._boundary.due(self.position, self._checks.begin()):
            if self._saved_position == self.position or self.position == 0:
                self._boundary.saved()
            else:
                self._save()
            if self._boundary.stopping:
                self._leave()

    def _save(self) -> None:
        assert self._feed is not None
        rest = {
            "step": self.position,
            "total": self.total,
            "loader": self._feed.state(self.epoch, self._drawn),
            "random": random_states.capture(),
        }
        with self.commit(self.position) as folder:
            storage.save(folder, self._objects, rest, self._place)
        self._saved_position = self.position
        self._boundary.saved()

    def _leave(self) -> None:
        if self._link is not None:
            self._link.flush()
            raise SystemExit(0)
        if self.rank == 0:
            print(f"ortflow: stopped after step {self.position} ({self.stop_reason}); saved", file=sys.stderr)
        raise SystemExit(EXIT_STOPPED_ALONE)

    def _find_scaler(self) -> None:
        """Register a gradient scaler that the program has not: it is small, and easily forgotten."""
        if self._scaler_looked_for:
            return
        self._scaler_looked_for = True
        registered = {id(value) for value in self._objects.values()}
        scalers = [scaler for scaler in registry.living_scalers() if id(scaler) not in registered]
        saved = self._resumed["objects"] if self._resumed is not None else {}
        if len(scalers) > 1:
            raise ProgramError(
                f"this program has {len(scalers)} gradient scalers: pass them to start(), each by a name"
            )
        if self._resumed is not None and bool(scalers) != (registry.SCALER in saved):
            raise ProgramError(
                "the checkpoint and this program do not both have a gradient scaler: use the same precision"
            )
        if scalers:
            self._objects[registry.SCALER] = scalers[0]
            if saved:
                registry.set_state(registry.SCALER, scalers[0], saved[registry.SCALER])


def start(objects: dict[str, Any], *, jax: bool) -> Run:
    """Make the process's run; `ortflow.program.start` describes it. Raises ProgramError."""
    if jax:
        _initialize_jax()
    if isinstance(part.current(), Run):
        raise ProgramError("start() was called before in this process: register all objects in one call")
    run = Run(part.current(), objects)
    part.replace_current(run)
    return run


def _initialize_jax() -> None:
    """With all arguments: in a pod, JAX's own detection needs an account's token, which ranks are not given."""
    from importlib import import_module

    number = int(os.environ.get("WORLD_SIZE", "1"))
    if number == 1:
        return
    import_module("jax").distributed.initialize(
        coordinator_address=os.environ["JAX_COORDINATOR_ADDRESS"],
        num_processes=number,
        process_id=int(os.environ["RANK"]),
        local_device_ids=None,
    )
