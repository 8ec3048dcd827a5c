"""Writes a RunSpec as a run file, RUN_DIR/run.yaml. `load_run_file` reads back an equal spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ortflow.workflow.spec.file.scalars import scalar
from ortflow.workflow.spec.run import OF_TRAINERS, ProgramRunSpec, RunSpec


def dump_run_file(spec: RunSpec) -> str:
    """YAML with every key, in the order of the model, without aliases."""
    left_out = {*OF_TRAINERS} if isinstance(spec, ProgramRunSpec) else None
    return dump_values(spec.model_dump(exclude=left_out))


def dump_values(values: Mapping[str, Any]) -> str:
    """The same of plain values."""
    return yaml.dump(
        dict(values),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=float("inf"),
    )


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        # An object that occurs twice would become an anchor and an alias, which run files do not allow.
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML quotes text that YAML 1.1 would read as another type; our reader has some more cases (1e-3). In single
    # quotes PyYAML 6.0.4 does not read back every line break that it writes: U+0085 becomes a space.
    style = None if isinstance(scalar(text), str) and text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
