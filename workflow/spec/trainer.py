"""The run file's `trainer` section: which trainer runs step 4, and its options."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ortflow.workflow.spec.base import Section, Text, no_keys


class TrainerSection(Section):
    """The trainer: `graph` for ONNX models, or one from a package."""

    name: Text = "graph"
    """`graph`, or a trainer installed for the ranks; docs/trainers.md explains how to write one."""
    options: dict[Text, Any] = Field(default_factory=no_keys)
    """Options of another trainer."""
