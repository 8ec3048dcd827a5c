"""A volume of a testbed that can be full: a small file system, or one with a quota, under a claim's folder, seen by
nodes and by this machine."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kubernetes_testbed import SCRIPTS, Space, Testbed

SIZE = 48 << 20
"""Bytes."""


@dataclass(frozen=True)
class SmallDisk:
    """Mounted wherever the volume is used: one device, so that it is one file system."""

    testbed: Testbed
    device: str
    folder: Path

    @classmethod
    def make(cls, space: Space, claim: str, folder: Path, *, quota: bool = False) -> SmallDisk:
        """Mount it under a claim that no pod uses yet; `folder` keeps its contents.

        With a quota, the kernel answers EDQUOT where there is free space: btrfs.
        """
        image = folder / f"{claim}.image"
        with image.open("wb") as file:
            file.truncate(2 << 30 if quota else SIZE)
        if quota:
            _run("mkfs.btrfs", "-q", str(image))
        else:
            _run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
        device = _run("losetup", "--find", "--show", str(image))
        options = _limited(device, folder) if quota else ()
        made = cls(space.testbed, device, space.volume(claim))
        made.run_on_nodes("mount", *options, device, str(made.folder))
        made.folder.chmod(0o777)
        return made

    def remove(self) -> None:
        """Unmount it; pods that still use it keep their mount until they end."""
        with suppress(AssertionError):
            self.run_on_nodes("umount", "--lazy", str(self.folder))
        _run("losetup", "--detach", self.device)

    def fill(self) -> None:
        """Fill the disk completely."""
        path = self.folder / "ballast"
        for size in (1 << 20, 1 << 12):
            with suppress(OSError), path.open("ab", buffering=0) as file:
                while file.write(bytes(size)):
                    pass
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def free(self) -> None:
        """Free the space again."""
        (self.folder / "ballast").unlink(missing_ok=True)
        _run("sync", "--file-system", str(self.folder))  # btrfs frees what a quota counts when it commits

    def run_on_nodes(self, *command: str) -> None:
        _run(*command)
        self.testbed.reported(str(SCRIPTS / "enter"), "--testbed", str(self.testbed.folder), *command)
        for node in self.testbed.nodes:
            self.testbed.node("exec", node, *command)


def _limited(device: str, folder: Path) -> tuple[str, str]:
    """Make a subvolume with a quota; the mount options that bring it."""
    whole = folder / "whole"
    whole.mkdir()
    _run("mount", device, str(whole))
    try:
        _run("btrfs", "quota", "enable", str(whole))
        _run("btrfs", "subvolume", "create", str(whole / "limited"))
        _run("btrfs", "qgroup", "limit", str(SIZE), str(whole / "limited"))
    finally:
        _run("umount", str(whole))
    return "-o", "subvol=limited"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()
