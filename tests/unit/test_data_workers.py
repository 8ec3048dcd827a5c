"""Worker processes make the same samples as the rank, are replaced when they are killed, and end with it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from data_sets import ragged, write_batches
from pictures import write_classes
from waits import wait_until

from ortflow.workflow.data.augmented import augmented
from ortflow.workflow.data.pooled import pooled
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.sources import open_samples
from ortflow.workflow.data.worker import receive, send
from ortflow.workflow.data.workers import Workers
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.spec.data import DataSection, DataSet
from ortflow.workflow.spec.transforms import Transform
from ortflow.workflow.system.module_process import start_module

ORDER = np.array([3, 0, 11, 7, 7, 5, 2, 9, 1])


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()
    assert not children()


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "ortflow.workflow.data.worker" in each.cmdline()]


def opened(path: Path, workers: Workers, *transforms: dict[str, Any]) -> tuple[Samples, Samples]:
    """The set, read by this process and by workers."""
    section = DataSet(path=str(path), transforms=[Transform.model_validate(one) for one in transforms])
    samples = open_samples(section)
    if transforms:
        samples = augmented(samples, section.transforms, 3, "data.train")
    return samples, pooled(samples, DataSection(train=section, micro_batch=1), 3, "data.train", workers)


def test_workers_give_the_same_bits_and_are_replaced(tmp_path: Path, workers: Workers) -> None:
    root = write_classes(tmp_path, {"cat": 6, "dog": 6})
    own, by_workers = opened(root, workers, {"flip": "horizontal"}, {"noise": 0.1}, {"mixup": 0.5})
    for epoch in (0, 1):
        for name in ("image", "label"):
            expected = own.at(epoch).read(name, ORDER)  # type: ignore[attr-defined]
            np.testing.assert_array_equal(by_workers.at(epoch).read(name, ORDER), expected)  # type: ignore[attr-defined]
    started = children()
    assert len(started) == 2
    started[0].send_signal(signal.SIGTERM)  # for the whole process group of a rank that is asked to save
    started[1].kill()
    started[1].wait()
    np.testing.assert_array_equal(by_workers.read("image", ORDER), own.read("image", ORDER))
    running = {each.pid for each in children()}
    assert started[0].pid in running
    assert started[1].pid not in running
    assert len(running) == 2
    workers.close()
    assert not children()
    np.testing.assert_array_equal(by_workers.read("image", ORDER), own.read("image", ORDER))


def test_functions_of_the_user_run_there(tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in_workers.py").write_text(
        "import os\nprint('a line that is no reply')\n"
        "def change(tokens, random):\n"
        "    if os.environ.get('TEST_ENDS'): os._exit(9)\n"
        "    tokens[0] = os.getpid() % 251\n    return tokens\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "set.arrow"
    write_batches(path, {"tokens": ragged([[0] * length for length in range(1, 13)], "int64")})
    _, by_workers = opened(path, workers, {"function": "in_workers:change", "column": "tokens"})
    samples = by_workers.read_ragged("tokens", ORDER)
    assert [len(sample) for sample in samples] == (ORDER + 1).tolist()
    assert {int(sample[0]) for sample in samples} <= {each.pid % 251 for each in children()}
    workers._stop()
    monkeypatch.setenv("TEST_ENDS", "1")
    with pytest.raises(
        OrtflowError,
        match=r"3 worker processes of the data ended \(exit code 9\) while they made the samples \d+.* of .*set\.arrow",
    ):
        by_workers.read_ragged("tokens", ORDER)


def test_a_write_that_the_kernel_cuts_short_is_continued(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One call writes at most 2 GiB; here, at most five bytes.
    (tmp_path / "short_writes.py").write_text(
        "import os\n"
        "pwrite = os.pwrite\n"
        "def change(tokens, random):\n"
        "    os.pwrite = lambda file, data, place: pwrite(file, memoryview(data).cast('B')[:5], place)\n"
        "    return tokens\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tokens = np.arange(1, 12 * 7 + 1, dtype=np.int64).reshape(12, 7)
    path = tmp_path / "set.npz"
    np.savez(path, tokens=tokens)
    _, by_workers = opened(path, workers, {"function": "short_writes:change", "column": "tokens"})
    np.testing.assert_array_equal(by_workers.read("tokens", ORDER), tokens[ORDER])


def test_a_damaged_file_is_named(tmp_path: Path, workers: Workers) -> None:
    root = write_classes(tmp_path, {"cat": 12})
    (root / "cat" / "007.png").write_bytes(b"damaged")
    _, by_workers = opened(root, workers)
    with pytest.raises(UserError, match=r"007\.png: cannot be decoded"):
        by_workers.read("image", ORDER)
    assert by_workers.read("image", np.array([1, 2])).shape == (2, 3, 8, 8)


PARENT = """
import sys, numpy as np
sys.path.insert(0, {support!r})
from pathlib import Path
from test_data_workers import *
write_classes(Path({folder!r}), {{"cat": 4}})
workers = Workers(2)
_, samples = opened(Path({folder!r}), workers)
samples.read("image", np.arange(4))
print(*[each.pid for each in children()], flush=True)
sys.stdin.read()
"""


class Late:
    """An object that is made of a module which only the path of the first message has."""

    def __reduce__(self) -> tuple[Any, ...]:
        return __import__, ("late_module",)


def messages(*contents: object) -> bytes:
    stream = io.BytesIO()
    for content in contents:
        send(stream, content)
    return stream.getvalue()


def worker_that_reads(sent: bytes) -> subprocess.Popen[bytes]:
    process = start_module(
        "ortflow.workflow.data.worker", "0", bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(sent)
    return process


def test_the_first_message_counts_before_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "late_module.py").write_text("")
    first, task = (str(tmp_path), [str(tmp_path), *sys.path], []), (7, 0, 0, "image", Late(), 0)
    with worker_that_reads(messages(first, task)) as process:
        assert process.stdout is not None
        number, _, fault = receive(process.stdout)
        process.kill()
    assert number == 7
    assert "IndexError" in fault[0], "there is no set"


def test_a_worker_that_cannot_read_a_task_ends(tmp_path: Path) -> None:
    with worker_that_reads(messages((str(tmp_path), sys.path, []), Late())) as process:
        assert process.wait(60) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_rank(tmp_path: Path, how: signal.Signals) -> None:
    here = Path(__file__).parent
    code = PARENT.format(support=str(here.parent / "support"), folder=str(tmp_path / "set"))
    environment = {**os.environ, "PYTHONPATH": str(here)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(how)
        parent.wait()
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_module_in_the_run_directory_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_classes(tmp_path / "images", {"cat": 2, "dog": 2})
    (tmp_path / "queue.py").write_text("open('executed', 'w')\n")
    (tmp_path / "numpy.py").write_text("open('executed', 'w')\n")
    monkeypatch.chdir(tmp_path)
    workers = Workers(1)
    own, by_workers = opened(root, workers, {"flip": "horizontal"})
    np.testing.assert_array_equal(by_workers.read("image", np.arange(4)), own.read("image", np.arange(4)))
    assert children()
    workers.close()
    assert not (tmp_path / "executed").exists()
