"""CSV and JSON lines read where they are: any row by number, kinds decided from the whole file, bad rows named."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from data_sets import write_batches
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from messages import mentions
from pyarrow import feather, parquet
from waits import PATIENCE

from ortflow.workflow.data.batches import Batches
from ortflow.workflow.data.check import check_inputs
from ortflow.workflow.data.digest import digest_of
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.inputs import BatchInput, Limits
from ortflow.workflow.data.order import SampleOrder
from ortflow.workflow.data.sources import open_evaluation, open_samples, open_training
from ortflow.workflow.data.tables import decode, pieces, scan, store
from ortflow.workflow.data.tables.samples import TableSamples
from ortflow.workflow.data.tables.text_table import TextTable
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSection, DataSet
from ortflow.workflow.spec.mapping import ColumnReference


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ORTFLOW_CACHE", str(folder))
    return folder / "tables"


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def opened(path: Path, **section: Any) -> TableSamples:
    samples = open_samples(DataSet.model_validate({"path": str(path), **section}))
    assert isinstance(samples, TableSamples)
    return samples


# Not a lone carriage return, which the csv module writes without quotes and reads as the end of a row.
TEXTS = st.text(st.sampled_from('ab",;\n\t é€x1'), max_size=6) | st.sampled_from(
    ['"', '""', "x" * 300, "7", " ", "a\r\nb"]
)


@settings(
    deadline=None,
    max_examples=80,
    phases=[Phase.generate],
    # A list of its own replaces the one of the profile `ci`, which has `too_slow`.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_row_is_as_the_csv_module_wrote_it(data: st.DataObject, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(pieces, "PIECE", data.draw(st.sampled_from([7, 64, 1 << 20])))
    rows = data.draw(st.lists(st.tuples(TEXTS, st.integers(-9, 9), TEXTS), min_size=1, max_size=12))
    file = io.StringIO(newline="")
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    quoting = data.draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    writer = csv.writer(file, lineterminator=end, quoting=quoting)
    writer.writerows([("left", "n", "right"), *rows])
    text = file.getvalue()
    if data.draw(st.booleans()):
        text = text.removesuffix(end)
    if data.draw(st.booleans()):
        text = "\ufeff" + text.replace(end, end + end, 1) + end
    path = written(tmp_path / f"{abs(hash(text))}.csv", text)
    table = TextTable([path], {})
    order = np.array(data.draw(st.permutations(range(len(rows)))))
    assert len(table) == len(rows)
    assert not table.bad
    taken = table.take(order, ["left", "n", "right"]).to_pydict()
    assert taken["n"] == [rows[row][1] for row in order]
    for place, name in ((0, "left"), (2, "right")):
        if table.summaries[name].kind == "text":
            assert taken[name] == [rows[row][place] for row in order]
    assert table.summaries["n"].mean == pytest.approx(np.mean([row[1] for row in rows]))
    assert table.summaries["n"].deviation == pytest.approx(np.std([row[1] for row in rows]))


@pytest.mark.parametrize("quoted", [False, True])
def test_a_record_may_be_longer_than_a_block_of_the_parser(quoted: bool, tmp_path: Path) -> None:
    long = "ab" * (3 << 19)
    rows = [("x", 1), (f'"{long},\n"' if quoted else long, 2), ("y", 3)]
    path = written(tmp_path / "t.csv", "text,n\n" + "".join(f"{text},{n}\n" for text, n in rows))
    table = TextTable([path], {})
    assert table.take(np.array([2, 1]), ["text", "n"]).to_pydict() == {
        "text": ["y", f"{long},\n" if quoted else long], "n": [3, 2],
    }  # fmt: skip


def test_quotes_inside_fields_without_quotes_are_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ['5" pipe,1', '"a\nb",2', 'x""y"z,3', '"a"b"c,4']
    path = written(tmp_path / "t.csv", "\n".join(["t,n", *rows]))
    for size in (5, 1 << 20):
        monkeypatch.setattr(pieces, "PIECE", size)
        monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / str(size)))
        table = TextTable([path], {})
        assert table.take(np.array([3, 1, 0, 2]), ["n"])["n"].to_pylist() == [4, 2, 1, 3]
        assert table.take(np.arange(4), ["t"])["t"].to_pylist()[:3] == ['5" pipe', "a\nb", 'x""y"z']


def test_the_last_row_decides_the_kind_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 256)
    lines = [f"{n},{n},NA,{n % 2}" for n in range(500)]
    path = written(tmp_path / "t.csv", "\n".join(["a,b,c,d", *lines, "x,0.5,y,1"]))
    samples = opened(path)
    kinds = {name: summary.kind for name, summary in samples.table.summaries.items()}
    assert kinds == {"a": "text", "b": "number", "c": "text", "d": "integer"}
    # What was read as a number or as missing before it was text is counted by its text.
    assert samples.classes["c"] == ["NA", "y"]
    assert samples.classes["a"][:3] == ["0", "1", "10"]
    assert samples.read("b", np.array([500, 3])).tolist() == [0.5, 3.0]
    assert samples.read("c", np.array([500, 3])).tolist() == [1, 0]


def test_columns_become_inputs(tmp_path: Path) -> None:
    train = written(
        tmp_path / "train.csv",
        "age,income,flag,job,species,day\n10,1.5,true,a,owl,1970-01-03\n30,,false,b,cat,1970-01-01\n20,2.5,true,a,owl,1970-01-02\n",
    )
    held_out = written(tmp_path / "eval.csv", "age,income,flag,job,species,day\n40,9,true,b,cat,1970-01-09\n")
    columns = {"x": ["age", "in*", "job"], "labels": "species"}
    fields: list[dict[str, Any]] = [
        {"columns": ["age"], "standardize": True},
        {"columns": ["income"], "missing": "mean"},
        {"columns": ["job"], "one_hot": True},
        {"columns": ["day"], "unit": "days"},
    ]
    data = DataSection.model_validate(
        {
            "train": {"path": str(train), "columns": columns, "fields": fields},
            "eval": {"path": str(held_out), "columns": columns},
            "micro_batch": 1,
        }
    )
    samples, evaluation = open_training(data, 0), open_evaluation(data, 0)
    assert evaluation is not None
    z = np.array([-1, 1, 0]) * np.sqrt(1.5)
    expected = np.array([[z[0], 1.5, 1, 0], [z[1], 2, 0, 1], [z[2], 2.5, 1, 0]])
    assert np.allclose(samples.read("x", np.arange(3)), expected)
    assert samples.read("species", np.array([1, 0])).tolist() == [0, 1]
    assert samples.read("flag", np.arange(3)).tolist() == [1, 0, 1]
    assert samples.read("day", np.arange(3)).tolist() == [2, 0, 1]
    # Statistics and classes are the training set's.
    assert np.allclose(evaluation.read("x", np.arange(1)), [[2 * np.sqrt(1.5), 9, 0, 1]])
    assert evaluation.read("species", np.arange(1)).tolist() == [0]
    inputs = [BatchInput("x", "float32", (None, 4)), BatchInput("labels", "int64", (None,), "label")]
    for each in (samples, evaluation):
        found = check_inputs(
            each, inputs, data.train.references, Limits(bounds={"labels": 2}),
            micro_batch=1, smaller_batch=False, key_path="w",
        )  # fmt: skip
        assert [feed.source.column for feed in found] == ["x", "species"]


@pytest.mark.parametrize(
    ("text", "section", "parts"),
    [
        ("a,b\n1,2\n3\n4,5\n", {}, ["t.csv, line 3", "1 field,", "header has 2", "1 of 3 rows"]),
        ("a,b\n1,2\n\n3,x\n4,5\n", {"fields": [{"columns": ["b"], "type": "number"}]}, ["t.csv, line 4", "'x'", "'b'"]),
        ("a,b\n1,2\n3,x\n", {"columns": {"x": ["a", "b"]}}, ["data.train.columns.x", "'b'", "text", "one_hot"]),
        ("a,b\n1,2\n", {"columns": {"x": ["c*"]}}, ["data.train.columns.x", "'c*'", "a, b"]),
        ("a,b\n1,x\n", {"fields": [{"columns": ["b"], "standardize": True}]}, ["data.train.fields[0]", "'b'", "text"]),
        ('a,b\n1,"x\n2,y\n', {}, ["t.csv, line 2", "quoted", "no end"]),
        ("a,a\n1,2\n", {}, ["line 1", "'a' twice"]),
        ("1,2\n3,4\n", {}, ["line 1", "numbers"]),
        ("a,b\n", {}, ["t.csv", "no row"]),
        ("", {}, ["t.csv", "no header"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(text: str, section: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", text)
    with pytest.raises(UserError) as caught:
        opened(path, **section)
    assert mentions(str(caught.value), *parts)


@pytest.mark.parametrize(
    ("text", "column", "parts"),
    [
        ("a,b\n1,2\n,3\n,4\n", "a", ["t.csv, line 3", "2 rows", "'a'", "missing"]),
        ("a,b\n1,2020-01-01\n", "b", ["t.csv", "'b'", "dates", "unit"]),
    ],
)
def test_columns_that_cannot_fill_an_input(text: str, column: str, parts: list[str], tmp_path: Path) -> None:
    samples = opened(written(tmp_path / "t.csv", text))
    with pytest.raises(UserError) as caught:
        check_inputs(
            samples,
            [BatchInput(column, "int64", (None,))],
            {},
            Limits(),
            micro_batch=1,
            smaller_batch=False,
            key_path="w",
        )
    assert mentions(str(caught.value), *parts)


@pytest.mark.parametrize(
    ("field", "parts"),
    [
        ({"columns": ["words"], "type": "number"}, ["fields[0].type", "'words' holds text by the file"]),
        ({"columns": ["n*"], "type": "text"}, ["fields[0].type", "'number' holds integer", "classes: sorted"]),
        ({"columns": ["hole"], "standardize": True}, ["fields[0].standardize", "'hole' has no mean", "NaN"]),
        ({"columns": ["hole"], "missing": "mean"}, ["fields[0].missing", "'hole' has no mean", "NaN or infinite"]),
        ({"columns": ["endless"], "standardize": True}, ["fields[0].standardize", "'endless' has no mean"]),
    ],
)  # fmt: skip
def test_what_columns_of_parquet_do_not_have(field: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    """One NaN would make all samples NaN; and a type that is stated would be ignored."""
    columns = {"words": ["1.5", "x"], "number": [1, 2], "hole": [1.0, float("nan")], "endless": [1.0, float("inf")]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(UserError) as error:
        opened(tmp_path / "t.parquet", fields=[field])
    assert mentions(str(error.value), *parts)


def test_a_missing_value_inside_a_list_is_named_by_its_row(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": [[1, 2], [], [3, None]]}), tmp_path / "t.parquet")
    samples = opened(tmp_path / "t.parquet")
    with pytest.raises(UserError) as error:
        samples.read_ragged("x", np.array([0, 2]))
    assert mentions(str(error.value), "t.parquet, row 2", "missing value inside the list 'x'")


def test_a_class_that_training_does_not_have_is_named(tmp_path: Path) -> None:
    train = written(tmp_path / "train.csv", "y\ncat\nowl\n")
    held_out = written(tmp_path / "eval.csv", "y\ncat\ncat\neel\n")
    data = DataSection.model_validate(
        {"train": {"path": str(train)}, "eval": {"path": str(held_out)}, "micro_batch": 1}
    )
    samples = open_evaluation(data, 0)
    assert isinstance(samples, TableSamples)
    assert mentions(str(samples.fault_of("y")), "eval.csv, line 4", "'eel'", "2 classes")


def test_bad_rows_up_to_a_share_are_skipped_and_counted(tmp_path: Path) -> None:
    lines = [f"{n},{n}" for n in range(100)]
    lines[40], lines[7] = "40", "oops,7"
    path = written(tmp_path / "t.csv", "\n".join(["a,b", *lines]))
    fields = [{"columns": ["a"], "type": "number"}]
    samples = opened(path, bad_rows=0.02, fields=fields)
    assert (len(samples), samples.reading.skipped) == (98, 2)
    assert samples.read("b", np.array([97, 7, 6, 39])).tolist() == [99, 8, 6, 41]
    with pytest.raises(UserError, match=r"more than the 1\.00% that"):
        opened(path, bad_rows=0.01, fields=fields)


def test_json_lines(tmp_path: Path) -> None:
    records = [{"x": [n, n + 1], "t": list(range(n % 3 + 1)), "y": "ab"[n % 2], "n": n} for n in range(50)]
    lines = [json.dumps(record) for record in records]
    lines[20:20] = ["", "  "]
    path = written(tmp_path / "t.jsonl", "\n".join(lines))
    samples = opened(path)
    order = np.array([49, 0, 20])
    assert samples.columns["t"].variable
    assert [row.tolist() for row in samples.read_ragged("t", order)] == [[0, 1], [0], [0, 1, 2]]
    assert samples.lengths("t").tolist() == [n % 3 + 1 for n in range(50)]
    assert samples.read("y", order).tolist() == [1, 0, 0]
    assert samples.table.name_of(49).endswith("line 52")
    bad = written(tmp_path / "bad.jsonl", '{"n": 1}\n{"n": "x"}\n[1]\n{"n"\n{"n": 2.5}\n')
    with pytest.raises(UserError) as caught:
        opened(bad)
    assert mentions(str(caught.value), "line 2", "'x'", "line 3", "object", "line 4", "JSON", "3 of 5 rows")
    assert opened(bad, bad_rows=0.7).read("n", np.arange(2)).tolist() == [1, 2.5]


def test_what_a_bad_line_of_json_leaves_good(tmp_path: Path) -> None:
    """Lines are only looked at one by one if one is bad: the others must then be what they are without it."""
    good = [{"id": 2**70, "user": {"age": 7}}, {"id": 5, "user": None}, {"id": 1.5, "user": {}}]
    bad = [{"id": "x", "user": {}}, {"id": 6, "user": 3}]
    for number, lines in enumerate((good, [*good, *bad])):
        path = written(tmp_path / f"{number}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        samples = opened(path, bad_rows=0.5)
        assert samples.read("id", np.arange(len(samples))).tolist() == [2.0**70, 5.0, 1.5]
    assert [line.partition(": ")[2] for line in samples.table.bad_rows] == [
        "has 'x' as 'id', which is number in other lines", "has 3 as 'user', which is a structure in other lines",
    ]  # fmt: skip


def test_several_files_are_one_table(tmp_path: Path) -> None:
    for part in range(3):
        written(tmp_path / f"part-{part}.csv", f"a,b\n{part},x\n{part + 10},y")
    for path in (tmp_path / "part-*.csv", tmp_path):
        samples = opened(path)
        assert samples.read("a", np.array([5, 0, 3, 4, 1])).tolist() == [12, 0, 11, 2, 10]
        assert list(samples.shard_counts) == [2, 2, 2]
        assert mentions(samples.table.name_of(3), "part-1.csv, line 3")
    written(tmp_path / "part-3.csv", "a,c\n1,2\n")
    with pytest.raises(UserError) as caught:
        opened(tmp_path / "part-*.csv")
    assert mentions(str(caught.value), "part-3.csv", "a, c", "part-0.csv", "a, b")


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a\n1\n2\n3\n")
    samples = opened(path)
    before = digest_of(samples)
    assert digest_of(opened(path)) == before
    written(path, "a\n1\n2\n4\n")
    with pytest.raises(UserError) as caught:
        samples.read("a", np.arange(3))
    assert mentions(str(caught.value), str(path), "changed since")
    assert digest_of(opened(path)) != before
    # What becomes of the columns belongs to the samples.
    assert digest_of(opened(path)) != digest_of(opened(path, fields=[{"columns": ["a"], "standardize": True}]))


@pytest.mark.parametrize("name", ["starts.bin", "sizes.bin", "record.json"])
def test_a_damaged_index_is_built_again(name: str, tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path / "t.csv", "a\n1\n2\n3\n")
    opened(path)
    file = next(cache.glob(f"*/{name}"))
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    assert opened(path).read("a", np.array([2, 0])).tolist() == [3, 1]
    assert file.read_bytes() != damaged
    assert [entry.name for entry in cache.iterdir()] == [file.parent.name]


def test_an_index_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "t.csv", "a\n1\n")
    opened(path)
    monkeypatch.setattr(scan, "pieces", None)
    assert len(opened(path)) == 1


def test_folders_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    path = written(tmp_path / "data" / "t.csv", "a\n1\n")
    (tmp_path / "file").touch()
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "data").chmod(0o500)
    assert len(opened(path)) == 1
    assert list((tmp_path / "data").iterdir()) == [path]
    (tmp_path / "data").chmod(0o700)
    monkeypatch.setattr(store, "cache_folders", lambda purpose: iter(()))
    with pytest.raises(UserError, match="ORTFLOW_CACHE"):
        opened(path)


def _open_in_a_process(path: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(len(TextTable([path], {})))


def test_two_processes_index_at_once(tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b\n" + "1,x\n" * 20_000)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    started = [context.Process(target=_open_in_a_process, args=(path, barrier, results)) for _ in range(2)]
    for process in started:
        process.start()
    assert [results.get(timeout=PATIENCE) for _ in started] == [20_000, 20_000]
    for process in started:
        process.join()
    assert len(list(cache.iterdir())) == 1


def test_a_resumed_epoch_on_other_ranks_has_the_same_rows(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "\n".join(["n,t", *(f'{n},"line\n{n}"' for n in range(60))]))
    feed = Feed("n", np.dtype("int64"), ColumnReference("n"))

    def read(ranks: int, position: Position, steps: int) -> tuple[list[int], Position]:
        seen: list[int] = []
        parts = []
        for rank in range(ranks):
            samples = opened(path)
            order = SampleOrder(len(samples), 3)
            batches = Batches(
                samples, order, [feed], micro_batch=12 // ranks, accumulation=1, rank=rank, world_size=ranks,
                last_batch="drop",
            )  # fmt: skip
            with batches.read_from(position) as reader:
                parts.append([next(reader) for _ in range(steps)])
        for step in range(steps):
            for part in parts:
                seen += part[step].micro_batches[0].arrays["n"].tolist()
        return seen, parts[0][-1].next

    whole, _ = read(1, Position(), 5)
    first, position = read(2, Position(), 2)
    rest, _ = read(3, position, 3)
    assert sorted(whole) == list(range(60))
    assert first + rest == whole


def test_a_table_has_the_samples_of_its_arrays(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(50, 2))
    path = written(tmp_path / "t.csv", "\n".join(["a,b", *(f"{a!r},{b!r}" for a, b in values.tolist())]))
    samples = opened(path, columns={"x": ["a", "b"]})
    dataset = write_batches(tmp_path / "t.arrow", {"x": values})
    order = np.random.default_rng(1).permutation(50)
    assert np.array_equal(samples.read("x", order), dataset.read("x", order))
    assert (samples.columns["x"].minimum, samples.columns["x"].maximum) == (values.min(), values.max())


def split(path: Path, held_out: dict[str, Any], seed: int = 0, **train: Any) -> tuple[Any, Any]:
    sets = {"train": {"path": str(path), **train}, "eval": held_out, "micro_batch": 1}
    data = DataSection.model_validate(sets)
    return open_training(data, seed), open_evaluation(data, seed)


def values(samples: Any, name: str) -> list[float]:
    numbers: list[float] = samples.read(name, np.arange(len(samples))).tolist()
    assert np.concatenate([part for _, part in samples.scan(name)]).tolist() == numbers
    return numbers


def test_a_share_of_the_rows_is_held_out(tmp_path: Path) -> None:
    lines = [f"{n},u{n % 7},{n // 10},{'ab'[n % 5 == 0]}" for n in range(100)]
    path = written(tmp_path / "t.csv", "\n".join(["n,user,day,y", *lines]))
    for seed in (0, 1):
        train, evaluation = split(path, {"fraction": 0.2}, seed)
        assert sorted(values(train, "n") + values(evaluation, "n")) == list(range(100))
        assert len(evaluation) == 20
        assert values(split(path, {"fraction": 0.2}, seed)[1], "n") == values(evaluation, "n")
    assert values(split(path, {"fraction": 0.2}, 0)[1], "n") != values(evaluation, "n")
    assert digest_of(split(path, {"fraction": 0.2}, 0)[0]) != digest_of(train)

    train, evaluation = split(path, {"fraction": 0.2, "group": "user"})
    assert not {n % 7 for n in values(train, "n")} & {n % 7 for n in values(evaluation, "n")}
    assert 14 <= len(evaluation) <= 30
    train, evaluation = split(path, {"fraction": 0.25, "time": "day"})
    assert values(evaluation, "n") == list(range(80, 100))
    train, evaluation = split(path, {"fraction": 0.2, "stratify": "y"})
    assert np.bincount(values(evaluation, "y")).tolist() == [16, 4]
    for held_out, parts in (
        ({"fraction": 0.001}, ["data.eval.fraction", "0.001 of 100", "none for evaluation"]),
        ({"fraction": 0.2, "group": "users"}, ["data.eval.group", "'users'", "user"]),
    ):
        with pytest.raises(UserError) as caught:
            split(path, held_out)
        assert mentions(str(caught.value), *parts)


def test_means_are_those_of_the_rows_for_training(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(3, 2, 50)
    path = written(tmp_path / "t.csv", "\n".join(["a", *map(repr, numbers.tolist())]))
    fields = [{"columns": ["a"], "standardize": True}]
    train, evaluation = split(path, {"fraction": 0.3}, fields=fields)
    own = numbers[train.rows]
    assert np.allclose(values(train, "a"), (own - own.mean()) / own.std())
    assert np.allclose(values(evaluation, "a"), (numbers[evaluation.rows] - own.mean()) / own.std())


def test_a_share_of_an_arrow_set_is_held_out(tmp_path: Path) -> None:
    columns = {"n": np.arange(40), "user": np.arange(40) % 4}
    write_batches(tmp_path / "set.arrow", columns)
    train, evaluation = split(tmp_path / "set.arrow", {"fraction": 0.25, "group": "user"})
    assert sorted(values(train, "n") + values(evaluation, "n")) == list(range(40))
    assert len(set(values(evaluation, "user"))) == 1


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow", "hugging face"])
def test_columnar_files(kind: str, tmp_path: Path) -> None:
    count = 300
    table = pa.table(
        {
            "n": pa.array(range(count), pa.int32()),
            "y": pa.array(["ab"[n % 2] for n in range(count)]).dictionary_encode(),
            "t": [list(range(n % 3 + 1)) for n in range(count)],
            "gap": pa.array([None if n == 7 else n / 2 for n in range(count)]),
            "odd": [{"a": n} for n in range(count)],
        }
    )
    path = tmp_path / f"t.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=70)
    elif kind == "feather":
        feather.write_feather(table, path, chunksize=70)
    elif kind == "arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    else:
        path = tmp_path / "set"
        path.mkdir()
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        with pa.ipc.new_stream(str(path / "data.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    samples = opened(path)
    order = np.array([299, 0, 150, 70, 69, 150])
    assert samples.read("n", order).tolist() == order.tolist()
    assert samples.read("y", order).tolist() == [n % 2 for n in order]
    assert [row.tolist() for row in samples.read_ragged("t", order)] == [list(range(n % 3 + 1)) for n in order]
    assert np.concatenate([part for _, part in samples.scan("n")]).tolist() == list(range(count))
    assert mentions(str(samples.fault_of("gap")), "row 7", "'gap'")
    assert mentions(str(samples.fault_of("odd")), "'odd'", "structures")
    assert digest_of(opened(path)) == digest_of(samples)


def test_columnar_files_in_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_ROWS", 16)
    monkeypatch.setattr(decode, "_PART_BYTES", 100)
    for part in range(2):
        rows = pa.table({"n": range(part * 50, part * 50 + 50), "t": [f"{n}" for n in range(50)]})
        parquet.write_table(rows, tmp_path / f"{part}.parquet")
    samples = opened(tmp_path)
    order = np.random.default_rng(0).permutation(100)
    assert samples.read("n", order).tolist() == order.tolist()
    assert mentions(samples.table.name_of(60), "1.parquet, row 10")
    (tmp_path / "0.parquet").write_bytes((tmp_path / "0.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match=r"0\.parquet.*damaged"):
        opened(tmp_path)
