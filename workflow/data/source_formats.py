"""What to do with a file that is no data set: the way from its format to one. Pure; called by errors alone."""

from __future__ import annotations

from pathlib import Path

TABLES = (".csv", ".tsv", ".tab", ".jsonl", ".ndjson", ".parquet", ".pq", ".feather")
"""Name's ends of tables, which a run reads where they are."""
RECORDS = (".jsonl", ".ndjson")
ARRAYS = (".npz", ".npy")
NOT_TEXT = (*RECORDS, *ARRAYS, ".parquet", ".feather", ".arrow")
"""Files whose bytes are no text to train on, or in whose lines the text is a field of several."""
NOT_LINES = (*NOT_TEXT, ".csv", ".tsv")


def way_to_a_set(path: Path) -> str:
    """How a file becomes a data set, as the end of a sentence."""
    end, arrow = path.suffix.lower(), f"{path.stem}.arrow"
    if end in ARRAYS:
        return f"convert it with `ortflow data convert {path.name} --output {arrow}`"
    if end in TABLES:
        return f"give its path alone: it is a table, which is read where it is, or `ortflow data convert {path.name}`"
    if end == ".json":
        return f"save it as JSON lines, as `jq -c '.[]' {path.name} > {path.stem}.jsonl` does"
    return (
        "save it as arrays in a .npz file, or give text with --text or --lines, to `ortflow data convert`, "
        "which docs/data.md describes"
    )


def way_to_lines(path: Path) -> str:
    """How the text in a file that is no plain text becomes text, as the end of a sentence."""
    end = path.suffix.lower()
    if end in RECORDS:
        return f"write one field of each record to a text file, as `jq -r .text {path.name} > {path.stem}.txt` does"
    if end in TABLES:
        return f"write one column to a text file, or {way_to_a_set(path)}"
    return "leave --text and --lines out, which are for text" if end in ARRAYS else "give text"
