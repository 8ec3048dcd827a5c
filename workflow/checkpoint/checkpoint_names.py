"""Names of what a folder of checkpoints holds."""

from __future__ import annotations

import re

from ortflow.workflow.system import own_files

MARKER = "COMMITTED"
MANIFEST = "manifest.json"
LOCK = ".run.lock"
"""Name of the lock of a folder outside its run directory, see `folder_lock`."""
TEMPORARY = ".tmp-"
TRASH = ".trash-"
REPLACED = ".replaced-"
"""The checkpoint of a step that is being saved again: what a kill before the commit leaves of it."""
ASIDE = "rejected-"
UNMARKED = ".unmarked"
PROGRAM = ".program"
"""In the temporary folder of a program's save: all that is in it is the save's. Removed before the commit."""
STEP = re.compile(r"step-([0-9]{8,})")
FILES = re.compile(
    rf"{MARKER}|{re.escape(MANIFEST)}|{re.escape(UNMARKED)}|rank-\d{{4,}}\.safetensors|{own_files.TEMPORARY}"
)
"""Files of a trainer's checkpoint."""
LEFT = re.compile(r"\.tmp-step-\d{8,}-\d{2,}|\.trash-step-\d{8,}(\.\d+)?")
"""Unfinished saves and deletions."""
LEFT_REPLACED = re.compile(r"\.replaced-step-([0-9]{8,})")
SET_ASIDE = re.compile(r"rejected-step-\d{8,}-\d{2,}(\.\d+)?")
_OWN = (STEP, LEFT, LEFT_REPLACED, SET_ASIDE, re.compile(re.escape(LOCK)))


def step_name(step: int) -> str:
    """Folder name of a checkpoint."""
    return f"step-{step:08d}"


def is_given(name: str) -> bool:
    """Whether a name in the folder is one that the store gives."""
    return any(pattern.fullmatch(name) for pattern in _OWN)
