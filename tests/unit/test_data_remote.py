"""Sets at URLs: fetched once, checked, and read like local files; each failure is one sentence."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from messages import mentions
from pictures import write_classes

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from ortflow.cli.applied import asked_of  # noqa: E402
from ortflow.cli.tables import show_table  # noqa: E402
from ortflow.workflow.data import remote  # noqa: E402
from ortflow.workflow.data.digest import digest_of  # noqa: E402
from ortflow.workflow.data.sources import open_samples, open_training  # noqa: E402
from ortflow.workflow.errors import UserError  # noqa: E402
from ortflow.workflow.inference.samples import opened  # noqa: E402
from ortflow.workflow.spec.data import DataSection, DataSet  # noqa: E402
from ortflow.workflow.steps import shard  # noqa: E402


class Server(SimpleHTTPRequestHandler):
    """Records the files that it sends."""

    def do_GET(self) -> None:
        self.server.sent.append(self.path)  # type: ignore[attr-defined]
        super().do_GET()

    def log_message(self, *given: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str, list[str]]]:
    """A folder, its URL, and the paths that were read."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=str(folder))) as server:
        server.sent = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}", server.sent  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))
    remote.fetched.cache_clear()
    yield tmp_path / "cache/remote"
    remote.fetched.cache_clear()


def values(*urls: str) -> list[int]:
    remote.fetched.cache_clear()
    samples = open_samples(DataSet(path=list(urls)))
    numbers: list[int] = samples.read("x", np.arange(len(samples))).tolist()
    return numbers


def refusal(*urls: str) -> str:
    with pytest.raises(UserError) as refused:
        values(*urls)
    return str(refused.value)


def test_a_table_of_a_web_server_is_fetched_once(
    served: tuple[Path, str, list[str]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url, sent = served
    (folder / "table.csv").write_text("x\n" + "".join(f"{row}\n" for row in range(1000)))
    (folder / "more.csv").write_text("x\n1000\n")
    assert values(f"{url}/table.csv?key=1", f"{url}/more.csv") == list(range(1001))
    assert values(f"{url}/table.csv?key=1", f"{url}/more.csv") == list(range(1001))
    assert sent == ["/table.csv?key=1", "/more.csv"]
    assert not [each for each in cache.iterdir() if each.suffix == ".lock" or each.name.startswith(".")]
    # Another version under the same name is fetched again.
    (folder / "table.csv").write_text("x\n5\n")
    assert values(f"{url}/table.csv?key=1") == [5]
    # What a killed process has left is no part of the next transfer.
    (folder / "table.csv").write_text("x\n6\n")
    with monkeypatch.context() as patched:
        patched.setattr(remote.os, "rename", lambda source, target: os._exit(9))
        process = multiprocessing.get_context("fork").Process(target=_count, args=(f"{url}/table.csv",))
        process.start()
        process.join()
    (left,) = [each for each in cache.iterdir() if each.name.startswith(".")]
    assert values(f"{url}/table.csv") == [6]
    assert not left.exists()
    # Processes that need a file at once fetch it once.
    sent.clear()
    (folder / "late.csv").write_text("x\n" + "7\n" * 10)
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        counts = pool.map(_count, [f"{url}/late.csv"] * 2, chunksize=1)
    assert counts == [10, 10]
    assert sent == ["/late.csv"]


def _count(url: str) -> int:
    return len(open_samples(DataSet(path=url)))


def test_secrets_of_a_url_are_in_no_message(served: tuple[Path, str, list[str]]) -> None:
    folder, url, _ = served
    (folder / "table.csv").write_text("x\nword\n")
    secret = url.replace("//", "//user:hush@")
    shown = refusal(f"{secret}/gone.csv?X-Amz-Signature=hush")
    assert shown == f"{url}/gone.csv?…: there is no such file; correct the URL"
    assert "hush" not in refusal("http://user:hush@127.0.0.1:9/a.csv?key=hush")
    section = DataSet(path=[f"{secret}/table.csv?key=hush", "b.csv"])
    assert section.title == f"{url}/table.csv?… and 1 more"
    assert DataSet(path="s3://bucket/part-?.csv").title == "s3://bucket/part-?.csv"
    assert DataSet(path="https://me:hush@host?key=hush").title == "https://host?…"
    error = OSError("404, url=URL('https://host/a%20b?key=hush'), from http://me:hush@other/")
    assert remote._line(error, "https://host/a b?key=hush") == (
        "404, url=URL('https://host/a%20b?…'), from http://other/"
    )


def test_failures_are_sentences(
    served: tuple[Path, str, list[str]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url, _ = served
    assert mentions(refusal(f"{url}/gone.csv"), f"{url}/gone.csv: there is no such file; correct the URL")
    assert mentions(refusal("http://127.0.0.1:9/a.csv"), "cannot be fetched … 127.0.0.1:9 … network")
    assert mentions(refusal("memory://gone.csv"), "no such file")
    assert mentions(refusal("nothing://a/b.csv"), "cannot be fetched … nothing … correct the URL")
    (folder / "short.csv").write_text("x\n1\n")
    system = type(fsspec.filesystem("memory"))
    fsspec.filesystem("memory").pipe("/short.csv", b"x\n1\n")
    info = system.info
    with monkeypatch.context() as patched:
        patched.setattr(system, "info", lambda self, path, **more: {**info(self, path, **more), "size": 9})
        assert mentions(refusal("memory://short.csv"), "arrived with 4 bytes instead of the 9")
    assert not cache.exists() or not list(cache.iterdir())
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "fsspec", None)
        assert mentions(refusal(f"{url}/short.csv"), "needs fsspec … pip install 'ortflow[remote]'")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "s3fs", None)
        patched.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # where a test has used it
        assert mentions(refusal("s3://bucket/a.csv"), "pip install 'ortflow[remote]'")


def test_folders_and_patterns_of_an_object_store(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for name in ("b", "a"):
        store.pipe(f"/bucket/tables/{name}.csv", f"x\n{ord(name)}\n".encode())
    assert values("memory://bucket/tables/*.csv") == [97, 98]
    assert values("memory://bucket/tables") == [97, 98]
    store.put(str(write_classes(tmp_path / "animals", {"cat": 1, "dog": 2})), "/bucket/animals", recursive=True)
    samples = open_samples(DataSet(path="memory://bucket/animals"))
    assert samples.read("label", np.arange(3)).tolist() == [0, 1, 1]


def test_the_commands_take_urls(served: tuple[Path, str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """A path object loses a slash of the URL."""
    folder, server, _ = served
    url = f"{server}/a.csv"
    (folder / "a.csv").write_text("x\n1\n2\n")
    samples = opened(asked_of(Path(url), [], None), None, 0).samples
    assert samples.read("x", np.arange(2)).tolist() == [1, 2]
    show_table(Path(url), as_json=False)
    assert capsys.readouterr().out.startswith(f"{url}: CSV, 2 rows")


def test_a_file_url_is_read_in_place(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a b.csv").write_text("x\n3\n")
    assert values(f"file://{tmp_path}/a%20b.csv") == [3]
    assert not cache.exists()
    assert mentions(refusal(f"file://{tmp_path}/c.csv"), f"{tmp_path}/c.csv: no such file")


def test_a_set_that_changes_during_its_fetch_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fsspec.filesystem("memory")
    store.pipe("/moving/a.csv", b"x\n1\n")
    get = type(store).get

    def late(self: Any, *given: Any, **options: Any) -> None:
        store.pipe("/moving/a.csv", b"x\n2\n")
        get(self, *given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "get", late)
        assert mentions(refusal("memory://moving/a.csv"), "memory://moving/a.csv: has changed while it was fetched")
    assert not list(cache.iterdir())
    assert values("memory://moving/a.csv") == [2]


def test_other_files_of_the_same_names_and_sizes_are_another_set(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run compares the hash of its set."""
    store = fsspec.filesystem("memory")
    store.put(str(write_classes(tmp_path / "animals", {"cat": 1, "dog": 2})), "/zoo", recursive=True)

    def digest() -> str:
        remote.fetched.cache_clear()
        return digest_of(open_samples(DataSet(path="memory://zoo")))

    (name, *_) = store.find("/zoo")
    before, data = digest(), store.cat(name)
    assert digest() == before
    store.pipe(name, data[:-1] + bytes([data[-1] ^ 1]))
    changed = digest()
    assert changed != before
    # The same files have the same hash, wherever they are kept.
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "other"))
    store.pipe(name, data)
    assert digest() == before


def test_ranks_that_fetch_different_versions_are_refused() -> None:
    store = fsspec.filesystem("memory")
    store.pipe("/ranks.csv", b"x\n1\n")
    section = DataSection(train=DataSet(path="memory://ranks.csv"), micro_batch=1)
    remote.fetched.cache_clear()
    plan = SimpleNamespace(data=digest_of(open_training(section, 0)))
    context: Any = SimpleNamespace(spec=SimpleNamespace(data=section, seed=0), plan=plan)
    shard._refuse_other_version(context)
    store.pipe("/ranks.csv", b"x\n2\n")
    remote.fetched.cache_clear()
    with pytest.raises(UserError, match="has changed between the fetches of two ranks"):
        shard._refuse_other_version(context)
