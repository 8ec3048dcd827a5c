"""Layers of an image as folders: made by running a command over the layers below, and packed in OCI's format.

A layer is the upper folder of an overlay file system: a deleted file is a character device 0/0, as in the kernel.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MACHINE = ("/etc/pip.conf", "/etc/resolv.conf")
"""Files of this machine that a command in the image sees, so that its network and package indexes work there."""
SCRIPT = r"""
cd "$1"; shift
layers=$1 upper=$2 root=$3 from=$4 target=$5; shift 5
options=lowerdir=$layers,upperdir=$upper/fs,workdir=$upper/work,redirect_dir=off,metacopy=off
mount -t overlay overlay -o "$options" "$root"
made=()
see() { # SOURCE TARGET: made visible for the command, and no part of the layer
  local top
  if [ ! -e "$root$2" ]; then
    top=$2
    while [ ! -e "$root$(dirname "$top")" ]; do top=$(dirname "$top"); done
    made+=("$root$top")
    if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$root$(dirname "$2")"; touch "$root$2"; fi
  fi
  mount --rbind "$1" "$root$2"
}
if [ -n "$from" ]; then
  other=$(mktemp -d)
  trap 'umount -l "$other"; rmdir "$other"' EXIT
  mount -t overlay overlay -o "lowerdir=$from" "$other"
  see "$other${target%%:*}" "${target#*:}"
fi
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
while [ "$1" != -- ]; do see "$1" "$1"; shift; done
shift
code=0
"$@" || code=$?
for path in "${made[@]}"; do umount -R -l "$path" 2>/dev/null || true; done
mount --make-rprivate /
awk -v root="$root/" 'index($5, root) == 1 {print $5}' /proc/self/mountinfo | sort -r | xargs -r umount -l
for path in "${made[@]}"; do rm -rf "$path"; done
umount "$root"
exit $code
"""


@dataclass(frozen=True)
class Layer:
    """One folder of the cache: KEY/fs, and KEY.tar once it is packed."""

    folder: Path
    key: str

    @property
    def files(self) -> Path:
        return self.folder / self.key / "fs"

    @property
    def tar(self) -> Path:
        return self.folder / self.key / "layer.tar"

    @property
    def digest(self) -> str:
        """The digest of the tar, which is made on first use."""
        known = self.folder / self.key / "digest"
        if not known.exists():
            pack(self.files, self.tar)
            known.write_text(subprocess.check_output(["sha256sum", str(self.tar)], text=True).split()[0])
        return known.read_text()

    @property
    def whole(self) -> bool:
        return (self.folder / self.key / "whole").exists()


def lower(below: Sequence[Layer]) -> str:
    """The option `lowerdir` for a mount in the folder of the layers: the topmost comes first."""
    return ":".join(f"{layer.key}/fs" for layer in reversed(below))


def make(
    layer: Layer,
    below: Sequence[Layer],
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    user: str = "0:0",
    workdir: str = "/",
    other: Sequence[Layer] = (),
    bind: str = "",
) -> None:
    """Run a command over layers; what it writes is the new layer. `bind` is SOURCE:TARGET, seen from `other` layers."""
    home = layer.folder / layer.key
    shutil.rmtree(home, ignore_errors=True)
    layer.files.mkdir(parents=True)
    (home / "work").mkdir()
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    seen = [path for path in (*MACHINE, *pip.values()) if path.startswith("/") and Path(path).exists()]
    variables = [f"{name}={value}" for name, value in {**pip, **environment}.items()]
    with tempfile.TemporaryDirectory() as root:
        inside = ["chroot", f"--userspec={user}", root, "env", "-i", "-C", workdir, *variables, *argv]
        subprocess.run(
            [
                "unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private",
                "bash", "-euc", SCRIPT, "_", str(layer.folder), lower(below), layer.key, root, lower(other), bind,
                *seen, "--", *inside,
            ],
            check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    shutil.rmtree(home / "work")
    (home / "whole").touch()


def pack(files: Path, target: Path) -> None:
    """A layer's folder as tar; owners by number, deleted files in OCI's form (.wh.NAME)."""
    temporary = target.with_suffix(".new")
    with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
        for parent, folders, names in os.walk(files):
            here = Path(parent)
            if parent != str(files):
                _add(tar, here, files)
            if _opaque(here):
                _gone(tar, here / ".wh..wh..opq", files)
            for name in sorted(names):
                path = here / name
                status = path.lstat()
                if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                    _gone(tar, here / f".wh.{name}", files)
                elif not stat.S_ISSOCK(status.st_mode):
                    _add(tar, path, files)
            for name in sorted(folders):
                if (here / name).is_symlink():
                    _add(tar, here / name, files)
            folders.sort()
    temporary.rename(target)


def _add(tar: tarfile.TarFile, path: Path, files: Path) -> None:
    info = tar.gettarinfo(path, str(path.relative_to(files)))
    info.uname = info.gname = ""
    if info.isreg():
        with path.open("rb") as file:
            tar.addfile(info, file)
    else:
        tar.addfile(info)


def _gone(tar: tarfile.TarFile, path: Path, files: Path) -> None:
    tar.addfile(tarfile.TarInfo(str(path.relative_to(files))))


def _opaque(folder: Path) -> bool:
    try:
        return os.getxattr(folder, "trusted.overlay.opaque") == b"y"
    except OSError:
        return False
