"""Repeats the check of the runtime and prints the result as one JSON object, for `ortflow doctor`."""

from __future__ import annotations

import json

from ortflow.workflow.errors import UserError
from ortflow.workflow.runtime_check.remember import runtime_here


def main() -> None:
    """Check and print."""
    try:
        runtime = runtime_here(afresh=True)
    except UserError as error:
        print(json.dumps({"fault": error.what, "fix": error.fix}))
        return
    settings = runtime.outcome.settings
    print(json.dumps({
        "package": runtime.package, "version": runtime.version, "seconds": runtime.seconds, "settings": str(settings),
        "faults": dict(runtime.outcome.faults),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
