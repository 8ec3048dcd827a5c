"""The verdicts on the mutants of a module, kept in a file from call to call."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from judge import Verdict
from operators import Mutant


class Session:
    """Verdicts of one module; they hold for one text of it, and a changed module starts anew.

    Parameters
    ----------
    folder
        The folder of all sessions.
    module
        Its path from the root of the tree.
    source
        Its text.
    """

    def __init__(self, folder: Path, module: str, source: str) -> None:
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        self._file = folder / f"{module.replace('/', '.').removesuffix('.py')}-{digest}.jsonl"
        self._verdicts: dict[str, Verdict] = {}
        self.read()

    def read(self) -> None:
        """Read the verdicts that the processes of the judge have recorded."""
        if self._file.exists():
            for line in self._file.read_text().splitlines():
                record = json.loads(line)
                self._verdicts[record["mutant"]] = Verdict(record["verdict"])

    def verdict(self, mutant: Mutant) -> Verdict | None:
        """The verdict on a mutant, None if it was not judged."""
        return self._verdicts.get(mutant.key)

    def record(self, mutant: Mutant, verdict: Verdict, test: str) -> None:
        """Append a verdict, and the test that failed."""
        self._verdicts[mutant.key] = verdict
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            record = {"mutant": mutant.key, "line": mutant.line, "verdict": verdict.value, "test": test}
            file.write(json.dumps(record) + "\n")

    def forget(self, verdict: Verdict) -> None:
        """Judge the mutants with this verdict again."""
        self._verdicts = {key: known for key, known in self._verdicts.items() if known is not verdict}

    def clear(self) -> None:
        """Judge all mutants again."""
        self._verdicts.clear()
        self._file.unlink(missing_ok=True)
