"""`ortflow checkpoint`: list, verify, show, delete and convert the checkpoints of a run.

Registered in `ortflow.cli.app`. Needs neither numpy nor ONNX Runtime. Must not import heavy packages at module level:
`--help` loads this module.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortflow.cli.runs import RUNS, JsonOption, RunsOption, complete_run, find_run, print_json
from ortflow.workflow.errors import EXIT_FAILURE, UserError

if TYPE_CHECKING:
    from ortflow.workflow.checkpoint.manifest import Damaged
    from ortflow.workflow.checkpoint.store import DirectoryStore
    from ortflow.workflow.checkpoint.verify import AnyManifest

app = typer.Typer(
    name="checkpoint", help="List, verify, show and delete the checkpoints of a run.", no_args_is_help=True
)

PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Name or directory of the run, or a folder of checkpoints.", autocompletion=complete_run
    ),
]
StepOption = Annotated[int | None, typer.Option(min=0, help="Only the checkpoint of this step.")]


@app.command(name="list")
def list_checkpoints(run: PlaceArgument, as_json: JsonOption = False, runs: RunsOption = Path(RUNS)) -> None:
    """List the checkpoints, oldest first, without reading the tensors."""
    from ortflow.launchers.view.lines import counted

    store = _store(run, runs)
    rows = [_row(store, step) for step in store.steps()]
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo(f"no checkpoints in {store.path}")
    for row in rows:
        name = Path(row["path"]).name
        if row["reason"] is not None:
            typer.echo(f"{name}  damaged: {row['reason']}")
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
        typer.echo(f"{name}  {when}  {_size(row['bytes']):>9}  {counted(row['world_size'], 'rank')}")
    for path in store.set_asides():
        typer.echo(f"{path.name}  damaged, renamed")


@app.command()
def verify(
    run: PlaceArgument, step: StepOption = None, as_json: JsonOption = False, runs: RunsOption = Path(RUNS)
) -> None:
    """Read every byte and name each damaged file.

    The exit code is 1 if there is one.
    """
    from ortflow.workflow.checkpoint.verify import verify as faults_of

    store = _store(run, runs)
    faults_of_steps = {number: faults_of(store, number) for number in _steps(store, step)}
    if as_json:
        print_json(
            [
                {"step": number, "path": str(store.place(number)), "whole": not faults, "faults": _plain(faults)}
                for number, faults in faults_of_steps.items()
            ]
        )
    else:
        for number, faults in faults_of_steps.items():
            for fault in faults:
                typer.echo(str(fault))
            if not faults:
                typer.echo(f"{store.place(number)}: whole")
    if any(faults_of_steps.values()):
        raise typer.Exit(EXIT_FAILURE)


@app.command()
def show(
    run: PlaceArgument,
    step: StepOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list each tensor: shape, group and offset.")] = False,
    as_json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Print the contents of a checkpoint.

    By default, of the newest committed one.
    """
    from ortflow.workflow.checkpoint.program import ProgramManifest

    store = _store(run, runs)
    manifest = _manifest(store, step)
    if as_json:
        print_json(_describe(store, manifest))
        return
    typer.echo(f"{store.place(manifest.step)}")
    typer.echo(f"saved     {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(manifest.time))}")
    tensors_of = None if isinstance(manifest, ProgramManifest) else manifest
    for name, spec in tensors_of.buffers.items() if tensors_of is not None else ():
        typer.echo(f"buffer    {name}: {spec.count} elements of {spec.dtype}")
    for file in manifest.files:
        typer.echo(f"file      {file.name}: {_size(file.size)}, {file.hash}")
    for name, value in tensors_of.progress.items() if tensors_of is not None else ():
        typer.echo(f"progress  {name}: {value}")
    for name, value in manifest.run.items():
        typer.echo(f"run       {name}: {value}")
    for name, value in manifest.environment.items():
        typer.echo(f"computed  {name}: {value}")
    if tensors_of is None:
        return
    typer.echo(f"tensors   {len(tensors_of.index)}")
    for entry in tensors_of.index if tensors else ():
        shape = "x".join(map(str, entry.tensor.shape)) or "scalar"
        typer.echo(f"  {entry.name}  {shape}  {entry.tensor.group}  at {entry.offset}")


@app.command()
def prune(
    run: PlaceArgument,
    newest: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")],
    every: Annotated[int | None, typer.Option(min=1, help="Also keep multiples of this step.")] = None,
    damaged: Annotated[
        bool,
        typer.Option(
            "--damaged", help="Also delete incomplete and corrupt ones; reads all that are kept. Not for an active run."
        ),
    ] = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Delete old checkpoints. Damaged ones are kept unless --damaged is given: they may hold the only copy."""
    from ortflow.workflow.checkpoint.retain import best_steps
    from ortflow.workflow.checkpoint.retain import prune as prune_store
    from ortflow.workflow.checkpoint.verify import verify as faults_of

    store = _store(run, runs)
    if damaged:
        _refuse_if_saving(store)
        for number in [number for number in store.steps() if faults_of(store, number)]:
            if not store.is_own(number):
                typer.echo(f"kept {store.place(number)}, which contains files that are not a checkpoint's", err=True)
                continue
            store.remove(number)
            typer.echo(f"deleted {store.place(number)}, which was damaged")
        for path in store.remove_set_asides():
            typer.echo(f"deleted {path}, which was damaged")
        for path in store.set_asides():
            typer.echo(f"kept {path}, which contains files that are not a checkpoint's", err=True)
    for number in prune_store(store, newest, every, best=best_steps(store)):
        typer.echo(f"deleted {store.place(number)}")


@app.command()
def reshape(
    run: PlaceArgument,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks whose files are written.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of checkpoints to write to.")],
    step: StepOption = None,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Write the files of another number of ranks.

    Converts the newest committed checkpoint by default.
    """
    from ortflow.launchers.view.lines import counted
    from ortflow.workflow.checkpoint.reshape import reshape as write
    from ortflow.workflow.checkpoint.store import DirectoryStore

    store, target = _store(run, runs), DirectoryStore(output)
    _refuse_if_saving(target)
    manifest = write(store, _manifest(store, step).step, ranks, target)
    typer.echo(f"{target.place(manifest.step)}: {counted(ranks, 'rank')}, {_size(manifest.size)}")


@app.command()
def merge(
    run: PlaceArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write, such as model.safetensors.")],
    moments: Annotated[bool, typer.Option("--moments", help="Also write the optimizer's moments.")] = False,
    step: StepOption = None,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Write the tensors of a checkpoint to one file.

    By default, of the newest committed one. The file is in the safetensors format, with the tensors' names.
    """
    from ortflow.workflow.checkpoint.reshape import merge as write

    store = _store(run, runs)
    merged_step = _manifest(store, step).step
    size = write(store, merged_step, output, moments=moments)
    typer.echo(f"{output}: step {merged_step}, {_size(size)}")


def _store(run: str, runs: Path) -> DirectoryStore:
    from ortflow.workflow.checkpoint.store import DirectoryStore

    folder = DirectoryStore(Path(run))
    if folder.steps() or folder.set_asides():
        return folder
    run_dir = find_run(run, runs)
    return DirectoryStore(run_dir.root / _checkpoint_directory(run_dir.run_file, run_dir.root))


def _refuse_if_saving(store: DirectoryStore) -> None:
    """Raise UserError if the run is active: a checkpoint that it has not yet marked as committed looks incomplete."""
    from ortflow.launchers.attempts.locks import holder_of
    from ortflow.workflow.run.rundir import RunDir

    for folder in store.path.absolute().parents:
        if holder_of(RunDir(folder).lock) is not None:
            raise UserError(f"the run in {folder} is active", fix="cancel it, or wait until it has ended")


def _checkpoint_directory(run_file: Path, root: Path) -> str:
    import yaml

    from ortflow.workflow.run.rundir import relocated
    from ortflow.workflow.spec.checkpoint import CheckpointSection
    from ortflow.workflow.system.files import read_whole

    try:
        values = yaml.safe_load(read_whole(run_file))
        folder = CheckpointSection.model_validate(values.get("checkpoint") or {}).directory
        return relocated(folder, values.get("run_dir"), root)
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError, RecursionError):
        raise UserError("cannot be read", where=str(run_file), fix="give the folder of the checkpoints") from None


def _steps(store: DirectoryStore, step: int | None) -> list[int]:
    steps = store.steps()
    if not steps or (step is not None and step not in steps):
        message = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        advice = f"there are steps {', '.join(map(str, steps))}" if steps else "wait until the run has saved one"
        raise UserError(f"{message} in {store.path}", fix=advice)
    return steps if step is None else [step]


def _manifest(store: DirectoryStore, step: int | None) -> AnyManifest:
    from ortflow.workflow.checkpoint.manifest import Damaged
    from ortflow.workflow.checkpoint.verify import read_any

    faults = []
    for number in reversed(_steps(store, step)):
        try:
            return read_any(store, number)
        except Damaged as fault:
            faults.append(fault)
    raise faults[0]


def _row(store: DirectoryStore, step: int) -> dict[str, Any]:
    from ortflow.workflow.checkpoint.manifest import Damaged
    from ortflow.workflow.checkpoint.verify import check_sizes, read_any

    row: dict[str, Any] = {"step": step, "path": str(store.place(step)), "committed": False, "reason": None}
    try:
        manifest = read_any(store, step)
        for fault in check_sizes(store, manifest):
            raise fault
    except Damaged as fault:
        return {**row, "reason": f"{fault.path.name} {fault.reason}"}
    return {
        **row,
        "committed": True,
        "time": manifest.time,
        "bytes": manifest.size,
        "world_size": manifest.world_size,
        "progress": _progress(manifest),
    }


def _progress(manifest: AnyManifest) -> dict[str, Any]:
    """How far the run was; of a program, only the step is known."""
    from ortflow.workflow.checkpoint.program import ProgramManifest

    return {"step": manifest.step} if isinstance(manifest, ProgramManifest) else dict(manifest.progress)


def _describe(store: DirectoryStore, manifest: AnyManifest) -> dict[str, Any]:
    from ortflow.workflow.checkpoint.program import ProgramManifest

    tensors_of = None if isinstance(manifest, ProgramManifest) else manifest
    return {
        "step": manifest.step,
        "path": str(store.place(manifest.step)),
        "time": manifest.time,
        "bytes": manifest.size,
        "world_size": manifest.world_size,
        "buffers": {name: vars(spec) for name, spec in tensors_of.buffers.items()} if tensors_of is not None else {},
        "files": [vars(file) for file in manifest.files],
        "progress": _progress(manifest),
        "environment": dict(manifest.environment),
        "run": dict(manifest.run),
        "tensors": tensors_of.index.to_json() if tensors_of is not None else [],
    }


def _plain(faults: list[Damaged]) -> list[dict[str, str]]:
    return [{"path": str(fault.path), "reason": fault.reason} for fault in faults]


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
