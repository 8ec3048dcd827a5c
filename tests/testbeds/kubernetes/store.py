"""Images for the nodes: store.py FOLDER TARGET NAME CONTENT…. Called by `image`.

Writes FOLDER/NAME.json (see builder.py) as an archive TARGET.tar for `ctr images import`, with the layers that
are not yet in each of the CONTENT folders (content stores of containerd), and TARGET.digest: its name and digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Write both files."""
    folder, target, name, *contents = sys.argv[1:]
    reported = json.loads(Path(folder, f"{name}.json").read_text())
    reference = f"localhost/{name.replace('@', ':')}"
    config, manifest = (json.dumps(reported[part]).encode() for part in ("config", "manifest"))
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    entry = {
        "mediaType": reported["manifest"]["mediaType"],
        "digest": digest,
        "size": len(manifest),
        "annotations": {"io.containerd.image.name": reference},
        "platform": {"architecture": "amd64", "os": "linux"},
    }
    with tarfile.open(f"{target}.new", "w") as tar:
        _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
        for blob in (config, manifest):
            _add(tar, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
        for layer, path in reported["layers"].items():
            if not all(_has(Path(content), layer) for content in contents) or not contents:
                tar.add(path, f"blobs/sha256/{layer}")
    Path(f"{target}.new").rename(f"{target}.tar")
    Path(f"{target}.digest").write_text(f"{reference} {digest}\n")


def _has(content: Path, layer: str) -> bool:
    return (content / "blobs/sha256" / layer).exists()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> Any:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


main()
