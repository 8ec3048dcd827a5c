"""Forward and backward graphs on disk, by the hash of the exported graph and of everything that they are made with.

Called by `plans` if the user names a folder (`cache`, ORTMODULE_CACHE_DIR). A file that cannot be read is made again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import onnx

from ortflow.torch.graphs import Pair
from ortflow.torch.proofs import key_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.kernels.library import source_key
from ortflow.workflow.run.rundir import write_atomically

_KEY = "ortflow.pair"


def cached(folder: Path, model: onnx.ModelProto, key: Iterable[str], make_pair: Callable[[], Pair]) -> Pair:
    """The graphs for an exported graph, from the folder, or made and stored there. Raises UserError."""
    # By the graph: onnxruntime-training 1.19.2 names its files by the module's repr, and ran the graph of another
    # constant.
    name = key_of([model], source_key(), key)[:32]
    forward, backward = (folder / f"{name}.{part}.onnx" for part in ("forward", "backward"))
    with contextlib.suppress(Exception):  # whatever a damaged file leads to
        return _read(forward, backward)
    pair = make_pair()
    first = onnx.ModelProto()
    first.CopyFrom(pair.forward)
    described = {
        "kept": pair.kept, "given": dict(pair.given), "wanted": pair.wanted, "aliases": dict(pair.aliases),
        "halves": dict(pair.halves), "backward": pair.backward is not None,
    }  # fmt: skip
    first.metadata_props.add(key=_KEY, value=json.dumps(described))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if pair.backward is not None:
            write_atomically(backward, pair.backward.SerializeToString())
        write_atomically(forward, first.SerializeToString())
    except OSError as error:
        raise UserError(f"cannot be written to ({error.strerror})", where=str(folder),
                        fix="set `cache` or ORTMODULE_CACHE_DIR to another folder") from error  # fmt: skip
    return pair


def _read(forward: Path, backward: Path) -> Pair:
    first = onnx.load_model_from_string(forward.read_bytes())
    described = json.loads(next(prop.value for prop in first.metadata_props if prop.key == _KEY))
    del first.metadata_props[:]
    second = onnx.load_model_from_string(backward.read_bytes()) if described["backward"] else None
    return Pair(
        first, second, tuple(described["kept"]), described["given"], tuple(described["wanted"]), described["aliases"],
        described["halves"],
    )  # fmt: skip
