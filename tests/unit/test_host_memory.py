"""How much memory the ranks may still take, with and without the limit of a cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from ortflow.workflow.system.host_memory import available, total

FREE = 10_000


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    class Memory:
        available = FREE

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    (tmp_path / "cgroup").write_text("0::/job/task\n")
    (tmp_path / "fs" / "job" / "task").mkdir(parents=True)
    return tmp_path


def limited(folder: Path, limit: str, used: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")


def found(machine: Path) -> int:
    return available(machine / "cgroup", machine / "fs")


def test_without_a_limit_it_is_what_is_free(machine: Path) -> None:
    assert found(machine) == FREE
    limited(machine / "fs" / "job" / "task", "max", 5)
    assert found(machine) == FREE
    assert available(machine / "none", machine / "fs") == FREE
    (machine / "cgroup").write_text("12:memory:/job\n")
    assert found(machine) == FREE


def test_a_limit_of_the_cgroup_or_of_one_around_it_counts(machine: Path) -> None:
    limited(machine / "fs" / "job" / "task", "9000", 1000)
    assert found(machine) == 8000
    limited(machine / "fs" / "job", "7000", 6500)
    assert found(machine) == 500
    limited(machine / "fs" / "job", "7000", 7500)
    assert found(machine) == 0
    # What is outside of the mounted tree is nobody's limit here.
    limited(machine, "1", 0)
    (machine / "fs" / "job" / "memory.max").write_text("max")
    assert found(machine) == 8000


def test_in_all_there_is_the_machines_memory_or_the_lowest_limit(machine: Path) -> None:
    memory = total(machine / "none", machine / "fs")
    assert memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limited(machine / "fs" / "job" / "task", str(2 * memory), 1000)
    assert total(machine / "cgroup", machine / "fs") == memory
    (machine / "fs" / "job" / "memory.max").write_text("7000\n")
    assert total(machine / "cgroup", machine / "fs") == 7000


def test_files_that_nobody_reads_any_more_are_not_used_memory(machine: Path) -> None:
    folder = machine / "fs" / "job" / "task"
    limited(folder, "9000", 8000)
    (folder / "memory.stat").write_text("anon 2500\ninactive_file 5000\nactive_file 500\n")
    assert found(machine) == 6000
    # More than is used: the two were read at different times.
    (folder / "memory.stat").write_text("inactive_file 8100\n")
    assert found(machine) == 9000
