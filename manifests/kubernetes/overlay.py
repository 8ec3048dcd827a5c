"""Strategic merge patches as in the API server: lists of named items are merged by name. Pure.

`$patch: delete` removes a section or an item, `$patch: replace` replaces it, null removes a key. The chart does the
same in `_overlay.tpl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortflow.workflow.spec.checks.kubernetes_native import DIRECTIVE, MERGE_KEYS
from ortflow.workflow.spec.kubernetes import Overlay


def matches(entry: Overlay, document: Mapping[str, Any]) -> bool:
    """Whether an overlay applies to a document: by kind, and by the end of its name."""
    meant = entry.name is None or document["metadata"]["name"].endswith(f"-{entry.name}")
    return bool(entry.kind == document["kind"] and meant)


def merge(base: dict[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A section with a patch applied."""
    result = dict(base)
    for key, value in patch.items():
        if key == DIRECTIVE:
            continue
        if value is None or (isinstance(value, Mapping) and value.get(DIRECTIVE) == "delete"):
            result.pop(key, None)
        elif isinstance(value, Mapping):
            under = result.get(key)
            keeps = isinstance(under, dict) and value.get(DIRECTIVE) != "replace"
            result[key] = merge(under if keeps and isinstance(under, dict) else {}, value)
        elif isinstance(value, list) and (name := merge_key(key, value)):
            under = result.get(key)
            result[key] = _merge_list(under if isinstance(under, list) else [], value, name)
        else:
            result[key] = value
    return result


def merge_key(key: str, patch: list[Any]) -> str | None:
    """The key that identifies the items of a list; None if there is none."""
    names = MERGE_KEYS.get(key, ())
    shared = next((name for name in names if any(name in item for item in patch)), None)
    # A list with only a `$patch: replace` names no items.
    return shared or next((name for name in names if any(DIRECTIVE in item for item in patch)), None)


def _merge_list(base: list[Any], patch: list[Any], name: str) -> list[Any]:
    if any(item.get(DIRECTIVE) == "replace" for item in patch):
        base = []
    result: list[Any] = []
    for old in base:
        patches = [item for item in patch if item.get(name) == old.get(name)]
        if any(item.get(DIRECTIVE) == "delete" for item in patches):
            continue
        for item in patches:
            old = merge(old, item)
        result.append(old)
    base_names = [old.get(name) for old in base]
    return [*result, *(merge({}, item) for item in patch if DIRECTIVE not in item and item.get(name) not in base_names)]
