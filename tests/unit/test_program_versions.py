"""The table of versions in docs/programs.md names what .ci/install_torch and .ci/build_horovod install."""

from __future__ import annotations

import re
from pathlib import Path

from documentation import DOCS

CI = Path(__file__).parents[2] / ".ci"
FRAMEWORKS = {
    "accelerate", "deepspeed", "horovod", "jax", "lightning", "torch", "torchdata", "transformers",
}  # fmt: skip


def installed() -> dict[str, str]:
    """Versions by package, from the scripts."""
    pins = re.findall(r"\b([a-z][\w-]*)==([\w.]+)", (CI / "install_torch").read_text())
    version = re.search(r"^pip=\S+ version=(\S+)$", (CI / "build_horovod").read_text(), re.MULTILINE)
    assert version is not None
    return {**dict(pins), "horovod": version[1]}


def test_the_table_of_versions_is_that_of_the_tests() -> None:
    section = (DOCS / "programs.md").read_text().partition("## Versions\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|[^|]*\| `([\w-]+)` ([\w.]+) \|", section, re.MULTILINE)
    versions = installed()
    assert {name for name, _ in rows} == FRAMEWORKS
    for name, version in rows:
        assert version == versions[name], f"docs/programs.md: {name} is {version}, and CI installs {versions[name]}"
