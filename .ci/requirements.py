"""What a command of pip installs beside ortflow itself: by this, cached environments are found again.

.ci/requirements.py WORD…      # the words of the command; a line for each requirement of ortflow's wheel among them

Needs CPython 3.11 for tomllib.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import tomllib

WHEEL = re.compile(r"ortflow-[^/]*\.whl(?:\[(?P<extras>[^]]*)\])?$")


def requirements(words: list[str], project: dict[str, Any]) -> list[str]:
    """Those of the project and of the extras that the words name, in their order.

    Raises
    ------
    KeyError
        If the project has no such extra.
    """
    found = [match for word in words if (match := WHEEL.search(word))]
    extras = [extra for match in found for extra in (match["extras"] or "").split(",") if extra]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [requirement for each in lists for requirement in each] if found else []


if __name__ == "__main__":
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    print("\n".join(requirements(sys.argv[1:], tomllib.loads(pyproject.read_text())["project"])))
