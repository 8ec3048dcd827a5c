"""The trees as a Helm chart: `python -m ortflow.manifests.kubernetes.chart FOLDER` writes what is generated of it.

A test compares the chart in the repository with what this makes, and what Helm makes of it with `documents`. By hand
are written only `templates/_functions.tpl`, the twins of `functions` and `overlay`, and what is text for people.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ortflow import __version__
from ortflow.manifests.kubernetes.chart_schema import TITLE, chart_schema
from ortflow.manifests.kubernetes.documents import PARTS, Part, all_defaults
from ortflow.manifests.kubernetes.dump import dump
from ortflow.manifests.kubernetes.options import doctor
from ortflow.manifests.kubernetes.template import block, expression
from ortflow.workflow.errors import UserError

NOTE = "Written by python -m ortflow.manifests.kubernetes.chart; changes are lost."


def chart() -> dict[str, str]:
    """Each generated file by its name in the chart."""
    files = {f"templates/{part.name}.yaml": _template(part) for part in PARTS}
    files["templates/tests/doctor.yaml"] = _template(Part("doctor", doctor()))
    files["templates/_defaults.tpl"] = _defaults()
    files["values.yaml"] = _values()
    files["values.schema.json"] = json.dumps(chart_schema(), indent=1) + "\n"
    files["Chart.yaml"] = _about()
    return files


def _template(part: Part) -> str:
    lines = [
        f"{{{{- /* {NOTE} */ -}}}}",
        f'{{{{- define "ortflow.{part.name}" }}}}',
        *block(part.tree),
        "{{- end }}",
        '{{- $scope := include "ortflow.scope" . | fromJson }}',
    ]
    made = f'{{{{- include "ortflow.document" (list $scope (include "ortflow.{part.name}" $scope)) }}}}'
    if part.condition is True:
        lines.append(made)
    else:
        condition = expression(part.condition).replace("$.", "$scope.")
        lines += [f"{{{{- if {condition} }}}}", made, "{{- end }}"]
    return "\n".join(lines) + "\n"


def _defaults() -> str:
    values = json.dumps(all_defaults(), indent=2, sort_keys=True)
    return f'{{{{- /* {NOTE} */ -}}}}\n{{{{- define "ortflow.defaults" -}}}}\n{values}\n{{{{- end -}}}}\n'


def _values() -> str:
    return (
        f"# {NOTE}\n"
        "# The values are a run file: helm install NAME charts/ortflow -f run.yaml. These are the defaults of what\n"
        "# the documents are made of; docs/run-file.md has all keys.\n"
    ) + _yaml(all_defaults())


def _yaml(values: dict[str, Any]) -> str:
    return dump([values]).removeprefix("---\n")


def _about() -> str:
    about: dict[str, Any] = {
        "apiVersion": "v2",
        "name": "ortflow",
        "description": "One training run of any ONNX model, as an MPIJob; the values are the run file.",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
        "kubeVersion": ">=1.27.0-0",
    }
    return f"# {NOTE}\n" + _yaml(about)


def _is_generated(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return (TITLE in text) if path.suffix == ".json" else (NOTE in text.partition("\n")[0])


def main(folder: Path) -> None:
    """Write the generated files, and take away those that are generated no more.

    Raises UserError where a file stands in the place of one that this program has not written.
    """
    files = chart()
    for name in files:
        path = folder / name
        if os.path.lexists(path) and not _is_generated(path):
            raise UserError("was not written by this program", where=str(path), fix="remove it, or name another folder")
    for path in (folder / "templates").rglob("*"):
        if str(path.relative_to(folder)) not in files and _is_generated(path):
            path.unlink()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(f"error: {error}")
