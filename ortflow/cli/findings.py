"""Prints findings as text or JSON: used by `ortflow doctor` and `ortflow image check`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from ortflow.cli.runs import print_json
from ortflow.workflow.errors import EXIT_FAILURE

if TYPE_CHECKING:
    from ortflow.launchers.findings import Finding


def print_findings(findings: Iterable[Finding], *, as_json: bool) -> None:
    """Print a line for each finding, or one JSON document; exits with code 1 if one is a fault."""
    from ortflow.launchers.findings import has_fault, summary

    shown: list[Finding] = []
    for finding in findings:
        shown.append(finding)
        if not as_json:
            typer.echo(str(finding))
    if as_json:
        print_json({"fault": has_fault(shown), "findings": [finding.to_json() for finding in shown]})
    else:
        typer.echo(summary(shown))
    if has_fault(shown):
        raise typer.Exit(EXIT_FAILURE)
