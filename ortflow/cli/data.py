"""`ortflow data`: make data sets and inspect them.

Registered in `ortflow.cli.app`. Must not import heavy packages at module level: `--help` loads this module.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortflow.workflow.errors import Faults, UserError

if TYPE_CHECKING:
    from ortflow.workflow.data.samples import Samples
    from ortflow.workflow.data.sources.audio import Audio
    from ortflow.workflow.data.sources.images import Images

app = typer.Typer(name="data", help="Create and inspect data sets.", no_args_is_help=True)


@app.command()
def convert(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...", help="A table; .npz or .npy files; with --text or --lines files, folders or patterns."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write; a folder with --shard-samples or --eval-fraction.")
    ],
    text: Annotated[bool, typer.Option("--text", help="Text as byte tokens, in windows of --length + 1.")] = False,
    lines: Annotated[bool, typer.Option("--lines", help="Text as byte tokens, one sample per line.")] = False,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Length of a window, and distance between the starts of two windows, in tokens."),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="Name of the column for text (default: tokens) or for a single .npy file.")
    ] = None,
    eval_fraction: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Fraction for evaluation: writes train and eval into the output folder."),
    ] = 0.0,
    shard_samples: Annotated[
        int | None, typer.Option(min=1, help="Write a folder of shards with this many samples each.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing data set.")] = False,
) -> None:
    """Convert a table, arrays or text into a data set."""
    _require_packages()
    from ortflow.workflow.data.convert import convert_arrays, convert_text
    from ortflow.workflow.data.text import find_files

    if not (text or lines) and len(sources) == 1 and column is None:
        from ortflow.workflow.data.sources import is_of_table, section_of

        if is_of_table(section_of(Path(sources[0]))):
            from ortflow.cli.tables import convert_table

            if eval_fraction:
                fix = "set data.eval.fraction in the run file, which holds samples out of any set"
                raise UserError("--eval-fraction is not for tables", fix=fix)
            convert_table(Path(sources[0]), output, shard_samples, force)
            return
    if text and lines:
        raise UserError("--text and --lines cannot be combined", fix="use one of them")
    if text != (length is not None):
        raise UserError("--text and --length must be given together", fix="give both, as in --text --length 256")
    files = find_files(sources)
    options: dict[str, Any] = {"eval_fraction": eval_fraction, "shard_samples": shard_samples, "replace": force}
    if text or lines:
        summary = convert_text(files, output, length=length, column=column or "tokens", **options)
    else:
        summary = convert_arrays(files, output, column=column, **options)
    for path, count in summary.items():
        typer.echo(f"{path}: {count} samples")


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="File or folder of shards.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a set's columns, number of samples, minima and maxima."""
    _require_packages()
    from ortflow.workflow.data.classes import classes_of
    from ortflow.workflow.data.sources import is_of_table, open_samples, preparation_of, section_of
    from ortflow.workflow.spec.locations import title_of

    if is_of_table(section_of(path)):
        from ortflow.cli.tables import show_table

        show_table(path, as_json)
        return
    samples = open_samples(section_of(path, **preparation_of(path)))
    summary = describe(samples)
    if as_json:
        typer.echo(json.dumps(summary))
        return
    files = f"{summary['shards']} file{'s' if summary['shards'] > 1 else ''}"
    typer.echo(f"{title_of(path)}: {summary['samples']} samples in {files}")
    for name, column in summary["columns"].items():
        shape = f"shape {column['shape']}" if column["shape"] else "scalar"
        if column["variable"]:
            shortest, longest = column["lengths"]
            shape = f"{shortest} to {longest} elements"
        span = "" if column["minimum"] is None else f", {column['minimum']:g} to {column['maximum']:g}"
        typer.echo(f"  {name}: {column['dtype']}, {shape}{span}")
    if classes := classes_of(samples):
        typer.echo(f"  classes: {', '.join(classes.values())}")


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="File, folder or quoted pattern.")],
) -> None:
    """Read all samples of a set once, and list bad ones; exit code 2 if there are any."""
    _require_packages()
    from ortflow.workflow.data.sources import is_of_table, section_of

    if is_of_table(section_of(path)):
        from ortflow.cli.tables import verify_table

        verify_table(path)
        return
    from ortflow.workflow.data.locations import places_of
    from ortflow.workflow.data.sources import is_images, open_samples, preparation_of
    from ortflow.workflow.data.sources.audio import Audio, unchecked
    from ortflow.workflow.data.sources.images import Images
    from ortflow.workflow.spec.locations import title_of
    from ortflow.workflow.spec.media import ImagesSection

    # Images of any size are right: the run file says what becomes of it.
    images = {"images": ImagesSection(resize=[32, 32])} if is_images(path) else {}
    sounds, noun = preparation_of(path), "images" if images else "files"
    section = section_of(path, **images, **sounds)
    dataset = unchecked(section, places_of(section)) if sounds else open_samples(section)
    if isinstance(dataset, (Images, Audio)):
        bad = [fault for number in range(len(dataset)) if (fault := _fault_of(dataset, number)) is not None]
        if bad:
            raise Faults(
                [*bad, UserError(f"{len(bad)} of {len(dataset)} {noun} are bad", fix="replace or remove them")]
            )
    else:
        for name in dataset.columns:
            for _, samples in dataset.scan(name):
                len(samples)
    typer.echo(f"{title_of(path)}: {len(dataset)} samples, all of them can be read")


def _fault_of(files: Images | Audio, number: int) -> UserError | None:
    try:
        files.check(number, files.blobs.read(number))
    except UserError as error:
        return error
    return None


def describe(dataset: Samples) -> dict[str, Any]:
    """A set as plain data; a variable column also has the shortest and the longest sample's length."""
    columns = {}
    for name, column in dataset.columns.items():
        columns[name] = {
            "dtype": column.dtype.name,
            "shape": list(column.shape),
            "variable": column.variable,
            "minimum": column.minimum,
            "maximum": column.maximum,
        }
        if column.variable:
            lengths = dataset.lengths(name)
            columns[name]["lengths"] = [min(lengths.tolist()), max(lengths.tolist())]
    return {"samples": len(dataset), "shards": len(dataset.shard_counts), "columns": columns}


def _require_packages() -> None:
    for package in ("numpy", "pyarrow"):
        if find_spec(package) is None:
            raise UserError(f"this command needs {package}", fix="install it with: pip install 'ortflow[train]'")
