"""`ortflow schema`: the run file's JSON schema, for editors that complete and check YAML.

Registered in `ortflow.cli.app`. Must not import heavy packages at module level: `--help` loads this module.
"""

from __future__ import annotations

import typer


def schema() -> None:
    """Print the JSON schema of the run file, for editors."""
    import json

    from ortflow.workflow.spec.file import installed as launchers
    from ortflow.workflow.spec.file.schema import run_file_schema
    from ortflow.workflow.steps.trainers import GRAPH, installed, load_builder

    options = {name: load_builder(name).Options for name in installed() if name != GRAPH.name}
    typer.echo(json.dumps(run_file_schema(options, launchers.others()), indent=2))
