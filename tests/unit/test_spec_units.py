from __future__ import annotations

import pytest

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.units import parse_memory, parse_time


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16G", 16 * 10**9),
        ("16Gi", 16 * 2**30),
        ("16GiB", 16 * 2**30),
        ("16 GB", 16 * 10**9),
        ("512M", 512 * 10**6),
        ("1.5Ti", 3 * 2**39),
        ("4k", 4000),
        ("4Ki", 4096),
        (" 2p ", 2 * 10**15),
    ],
)
def test_memory(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "16", "G", "-1G", "1e3G", "16X", "16Gib/s", "0G", "1.G", "9" * 30 + "G"])
def test_no_memory(text: str) -> None:
    with pytest.raises(UserError, match="memory") as caught:
        parse_memory(text)
    assert "16G" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("00:00:01", 1),
        ("12:30:00", 45000),
        ("36:00:00", 129600),
        ("1-06:30:00", 109800),
        ("2-0:00:00", 172800),
    ],
)
def test_time(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "12:30", "1-12", "0", "00:00:00", "1:60:00", "-5", "1h", "1.5", "1:2:3:4"])
def test_no_time(text: str) -> None:
    with pytest.raises(UserError, match=r"time|duration") as caught:
        parse_time(text)
    assert "12:00:00" in str(caught.value)
