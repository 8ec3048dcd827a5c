"""Digests of values, with which two runs are compared bit by bit.

Called by `trace` and `living` in the user's program. Imports nothing but the standard library: torch and numpy are used
only if the program has imported them.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)
CONTAINERS = (list, tuple, deque, dict, set, frozenset)
MOST_ITEMS = 100_000
"""Items of a container that are read: a list of a million samples must not take seconds of every step."""
MOST_BYTES = 1 << 28
"""Bytes of an array of numpy that are hashed; of a larger one a sample is. Tensors are cached by their version."""
DEPTH = 40


def digest(value: Any) -> str:
    """The digest of a value: equal for equal bits, in every process and for every seed of the hash of strings."""
    hasher = hashlib.blake2b(digest_size=8)
    _feed(hasher, value, DEPTH)
    return hasher.hexdigest()


def order_digest(value: set[Any] | frozenset[Any]) -> str:
    """The digest of the order in which a set is iterated; `digest` does not depend on it."""
    return digest([digest(item) for item in islice(value, MOST_ITEMS)])


def is_plain(value: Any, depth: int = 6) -> bool:
    """Whether a value consists of numbers, text and containers of these alone."""
    if isinstance(value, PLAIN):
        return True
    if depth == 0 or type(value) not in CONTAINERS:
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(is_plain(item, depth - 1) for item in islice(items, MOST_ITEMS))


def leaves(value: Any, name: str = "", depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """The tensors and plain values of a state_dict, each with the path of its keys, such as `state.0.exp_avg`."""
    if isinstance(value, Mapping) and depth:
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}" if name else str(key), depth - 1)
    elif isinstance(value, (list, tuple)) and depth and not is_plain(value):
        for place, item in enumerate(value):
            yield from leaves(item, f"{name}.{place}" if name else str(place), depth - 1)
    else:
        yield name, value


def torch_module() -> Any:
    """The module torch if the program has imported it completely, otherwise None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and hasattr(torch, "nn") and hasattr(torch, "Tensor") else None


def numpy_module() -> Any:
    """The module numpy if the program has imported it completely, otherwise None."""
    numpy = sys.modules.get("numpy")
    return numpy if numpy is not None and hasattr(numpy, "ndarray") and hasattr(numpy, "random") else None


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch."""
    torch = torch_module()
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Whether a value is an array or a scalar of numpy."""
    numpy = numpy_module()
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def tensor_digest(tensor: Any) -> str:
    """The digest of a tensor; that of an unchanged one is remembered, by its storage and version."""
    try:
        key = (tensor.data_ptr(), tensor._version, str(tensor.dtype), tuple(tensor.shape), tensor.stride())
    except (AttributeError, RuntimeError, NotImplementedError):  # sparse, meta, inference mode
        return digest_of_bytes(_tensor_bytes(tensor))
    # Memory that was freed can be given to another tensor with the same version.
    remembered = _REMEMBERED.get(id(tensor))
    if remembered is not None and remembered[0]() is tensor and remembered[1] == key:
        return remembered[2]
    result = digest_of_bytes(_tensor_bytes(tensor))
    if tensor.numel() > 1 << 20:
        import weakref

        _REMEMBERED[id(tensor)] = (weakref.ref(tensor), key, result)
    return result


_REMEMBERED: dict[int, tuple[Any, Any, str]] = {}


def digest_of_bytes(parts: Sequence[bytes]) -> str:
    """The digest of several pieces."""
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _tensor_bytes(tensor: Any) -> list[bytes]:
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    torch = torch_module()
    with torch.no_grad():
        if hasattr(tensor, "to_local"):  # a DTensor: this rank's part
            tensor = tensor.to_local()
        if tensor.is_meta:
            return [head]
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_quantized:
            tensor = tensor.int_repr()
        if torch.is_complex(tensor):
            tensor = torch.view_as_real(tensor.resolve_conj())
        # A copy of one element has another address; numpy has no bfloat16 and may be missing.
        host = tensor.detach().resolve_neg().cpu().contiguous()
        return [head, ctypes.string_at(host.data_ptr(), host.numel() * host.element_size())]


def _feed_array(hasher: Any, array: Any) -> None:
    numpy = numpy_module()
    array = numpy.asarray(array)
    hasher.update(f"{array.dtype.str}{array.shape}".encode())
    if array.dtype.hasobject:
        _feed(hasher, array.tolist(), DEPTH)
        return
    if array.nbytes > MOST_BYTES:
        flat = array.reshape(-1)
        array = flat[:: max(1, array.nbytes // MOST_BYTES)]
    hasher.update(numpy.ascontiguousarray(array).tobytes())


def _feed(hasher: Any, value: Any, depth: int) -> None:
    if isinstance(value, float):
        hasher.update(b"f" + struct.pack("<d", value))
    elif isinstance(value, (type(None), bool, int, complex)):
        hasher.update(f"{type(value).__name__}{value!r};".encode())
    elif isinstance(value, str):
        hasher.update(f"s{len(value)}:".encode() + value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray)):
        hasher.update(f"b{len(value)}:".encode() + value)
    elif depth == 0:
        hasher.update(b"...")
    elif is_tensor(value):
        hasher.update(tensor_digest(value).encode())
    elif is_array(value):
        _feed_array(hasher, value)
    elif isinstance(value, (set, frozenset)):
        hasher.update(f"set{len(value)}".encode())
        for item in sorted(digest(item) for item in islice(value, MOST_ITEMS)):
            hasher.update(item.encode())
    elif isinstance(value, Mapping):
        hasher.update(f"dict{len(value)}".encode())
        for key, item in islice(value.items(), MOST_ITEMS):
            _feed(hasher, key, depth - 1)
            _feed(hasher, item, depth - 1)
    elif isinstance(value, (list, tuple, deque)):
        hasher.update(f"list{len(value)}".encode())
        for item in islice(value, MOST_ITEMS):
            _feed(hasher, item, depth - 1)
    else:
        # An address in the text of an object would differ in every process.
        hasher.update(f"{type(value).__module__}.{type(value).__qualname__}".encode())
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            _feed(hasher, attributes, min(depth - 1, 8))
