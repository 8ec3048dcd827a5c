"""The JSON schema and docs/run-file.md match the types."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

import pytest
from documentation import DOCS, writer_of
from run_files import reported

from ortflow.workflow.spec.file import load
from ortflow.workflow.spec.file.help import fill
from ortflow.workflow.spec.file.keys import every_key, sections, tags
from ortflow.workflow.spec.file.schema import run_file_schema
from ortflow.workflow.spec.file.shorthand import forms_of
from ortflow.workflow.spec.run import RunSpec

PAGE = (DOCS / "run-file.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return writer_of("run_file_tables")


def test_the_tables_are_those_of_the_types(generator: ModuleType) -> None:
    assert generator.updated(PAGE) == PAGE, "run: python docs/run_file_tables.py"


def test_every_key_is_documented() -> None:
    fill(RunSpec)
    for path, field in every_key():
        assert field.description, f"{'.'.join(path)} has no help text"
        heading = f"### `{'.'.join(path[:-1])}`" if len(path) > 1 else "### The top level"
        tables = [part.partition("\n### ")[0] for part in PAGE.split(heading)[1:]]
        assert any(f"\n| `{path[-1]}` |" in table for table in tables), f"{'.'.join(path)} is not in docs/run-file.md"


def test_the_examples_of_the_docs_are_valid(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(name:.*?)```", PAGE, re.DOTALL)
    assert len(examples) >= 4
    for example in examples:
        assert reported(tmp_path, example) == []


def test_the_faults_of_the_docs_are_reported_that_way(tmp_path: Path) -> None:
    example = re.findall(r"```yaml\n(name:.*?)```", PAGE, re.DOTALL)[0]
    wrong = example.replace("name: adamw, lr: 1e-3", "name: adan")
    unknown = example.replace("lr: 1e-3", "learning_rate: 1e-3")
    found = [*reported(tmp_path, wrong), *reported(tmp_path, unknown), *reported(tmp_path, example, "train.stpes=1")]
    lines = re.findall(r"^(?:run\.yaml:\d+|on the command line,) .*$", PAGE, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        assert line in found


def test_every_required_key_has_a_stand_in() -> None:
    """Without one, a file that lacks the key would not be checked any further. A faulty list, or a faulty one of the
    named sections of a mapping, is omitted as a whole."""
    lists = {path for path, field in every_key() if get_origin(field.annotation) in (list, dict)}
    for path, field in every_key():
        if (
            field.is_required()
            and path not in load.CHOOSES
            and not any(path[:depth] in lists for depth in range(len(path)))
        ):
            assert path in load.STAND_INS, ".".join(path)


def test_the_schema_has_short_forms() -> None:
    schema = run_file_schema()
    assert json.loads(json.dumps(schema)) == schema
    train = schema["$defs"]["TrainSection"]["properties"]
    assert train["schedule"]["anyOf"][0]["enum"][:5] == ["constant", "linear", "polynomial", "cosine", "step"]
    assert {"adam", "adamw", "lamb", "sgd", "muon"} < {*train["optimizer"]["anyOf"][0]["enum"]}
    assert schema["$defs"]["DataSection"]["properties"]["eval"]["anyOf"][0]["type"] == "string"
    assert schema["properties"]["prepare"]["anyOf"][0] == {"type": "string"}
    assert schema["additionalProperties"] is False


def test_the_schema_describes_every_key() -> None:
    def described(section: dict[str, Any]) -> None:
        for name, value in section["properties"].items():
            assert "description" in value or "$ref" in value, name

    schema = run_file_schema()
    described(schema)
    for section in schema["$defs"].values():
        described(section)


def test_a_section_whose_source_is_gone_harms_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "brief_package.py"
    source.write_text("from ortflow.workflow.spec.base import Section\nclass Brief(Section):\n    key: int = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("brief_package").Brief
    source.unlink()
    (rule,) = run_file_schema({"brief": kind})["$defs"]["TrainerSection"]["allOf"]
    assert rule["then"]["properties"]["options"]["properties"]["key"] == {
        "default": 1,
        "title": "Key",
        "type": "integer",
    }
    monkeypatch.delitem(sys.modules, "brief_package")
    assert run_file_schema()["$defs"]["Restart"]["properties"]["failures"]["description"]
    assert reported(tmp_path, "name: [1]")


def test_the_schema_is_the_same_in_every_order() -> None:
    """A message about a run file reads the help texts; pydantic may then see them when it builds the schema."""
    program = (
        "import json\nfrom ortflow.workflow.spec.file.schema import run_file_schema\n"
        "from ortflow.workflow.spec.file.help import fill\nfrom ortflow.workflow.spec.run import RunSpec\n"
        "{first}\nprint(json.dumps(run_file_schema()))"
    )
    plain, filled = (
        subprocess.run([sys.executable, "-c", program.format(first=first)], capture_output=True, text=True, check=True)
        for first in ("", "fill(RunSpec)")
    )
    assert plain.stdout == filled.stdout


def test_short_forms_name_keys_that_exist() -> None:
    fields = dict(every_key())
    for path, key in forms_of({}).sections.items():
        assert any(key in section.model_fields for section in sections(fields[path]))
    assert tags(sections(fields["train", "optimizer"])[0], "name") == ("adam", "adamw")
