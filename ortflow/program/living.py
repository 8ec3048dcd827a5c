"""The objects of a running program that have state: names, kinds and digests.

Called by `trace` before each step, in the user's process. Starts at the variables of the calling functions and of the
user's modules and follows attributes, containers, closures and iterators. It must not change anything: it calls no
method of the user's classes but `state_dict`, and does not advance an iterator. torch and numpy only through
`digests`, if the program has imported them.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import random
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ortflow.program import digests, iterators
from ortflow.program.user_code import OWN, is_users, is_users_class, roots

DEPTH = 8
MOST_ENTRIES = 20_000
MOST_ITEMS = 500
"""Elements of a container that are followed one by one."""
SHOWN = 40


class Entry(NamedTuple):
    """The state of one variable, or of one part of an object."""

    kind: str
    digest: str
    shown: str
    """A short text of the value; empty if it has none."""
    file: str
    """The file of the variable that holds it."""


def living(frame: types.FrameType | None, registered: Mapping[str, Any]) -> dict[str, Entry]:
    """The entries of what is not registered, by key `file:function:path`."""
    walk = _Walk(registered)
    for name, value, scope, file in roots(frame):
        if len(walk.entries) > MOST_ENTRIES:
            break
        walk.visit(f"{os.path.basename(file)}:{scope}:{name}", value, file, DEPTH)
    return walk.entries


_LIBRARIES_OF_GENERATORS = ("random", "numpy.random", "torch")


def generator_state(value: Any) -> Any:
    """The state of a random generator of Python, numpy or torch; None for anything else."""
    torch, numpy = digests.torch_module(), digests.numpy_module()
    if isinstance(value, random.Random):
        return "" if isinstance(value, random.SystemRandom) else value.getstate()
    if torch is not None and isinstance(value, torch.Generator):
        return value.get_state()
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state(legacy=False)
    return None


def _is_of_process(generator: Any) -> bool:
    """Whether a generator is the one that a library's functions use."""
    torch, numpy = digests.torch_module(), digests.numpy_module()
    shared_generators = [getattr(random, "_inst", None)]
    shared_generators += [torch.default_generator] if torch is not None else []
    shared_generators += [getattr(numpy.random.mtrand, "_rand", None)] if numpy is not None else []
    return any(generator is shared for shared in shared_generators)


class _Walk:
    """One traversal."""

    def __init__(self, registered: Mapping[str, Any]) -> None:
        self.entries: dict[str, Entry] = {}
        self._seen: dict[int, Any] = {}
        self._file = ""
        self._registered = {id(value) for value in registered.values()}
        self._storages: set[Any] = set()
        for value in registered.values():
            for tensor in _tensors_of(value):
                self._storages.add(_storage(tensor))

    def visit(self, name: str, value: Any, file: str, depth: int) -> None:
        """Add the entries of a value that a variable holds."""
        self._file = file
        self._visit(name, value, depth)

    def _add(self, name: str, kind: str, digest: str, shown: str = "") -> None:
        self.entries[name] = Entry(kind, digest, shown[:SHOWN], self._file)

    def _visit(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, digests.PLAIN):
            kind = "number" if isinstance(value, (bool, int, float, complex)) else "text"
            self._add(name, kind, digests.digest(value), repr(value))
            return
        if depth == 0 or len(self.entries) > MOST_ENTRIES or id(value) in self._seen or isinstance(value, _SKIPPED):
            return
        self._seen[id(value)] = value  # alive, so that no other object gets its identity
        if type(value).__module__.startswith(OWN):
            return
        try:
            self._object(name, value, depth - 1)
        except Exception as error:  # noqa: BLE001  a property or state_dict of the user may raise anything
            self._add(name, "unreadable", type(error).__name__)

    def _object(self, name: str, value: Any, depth: int) -> None:
        if self._generator(name, value) or self._torch(name, value, depth) or self._iterator(name, value, depth):
            return
        if digests.is_array(value):
            self._add(name, "array" if value.size > 1 else "number", digests.digest(value), _brief(value))
        elif isinstance(value, (set, frozenset)) and digests.is_plain(value):
            self._add(name, "set", digests.digest(value), f"{len(value)} elements")
            self._add(f"{name}<order>", "order", digests.order_digest(value))
        elif isinstance(value, digests.CONTAINERS):
            self._container(name, value, depth)
        elif isinstance(value, io.IOBase):
            self._file_position(name, value)
        elif isinstance(value, types.FunctionType):
            self._closure(name, value, depth)
        elif isinstance(value, types.MethodType):
            self._visit(f"{name}.__self__", value.__self__, depth)
        elif isinstance(value, functools.partial):
            self._visit(f"{name}.func", value.func, depth)
            self._visit(f"{name}.args", (value.args, value.keywords), depth)
        elif isinstance(value, type):
            if is_users_class(value):
                self._attributes(name, value.__dict__, depth)
        elif is_users_class(type(value)):
            self._attributes(name, _fields(value), depth)
            kind = type(value)
            self._visit(f"{os.path.basename(self._file)}::{kind.__qualname__}", kind, depth)
        elif callable(getattr(value, "state_dict", None)):
            self._state(name, "state", value)

    def _generator(self, name: str, value: Any) -> bool:
        state = generator_state(value)
        if state is None:
            return False
        if not _is_of_process(value) and id(value) not in self._registered:
            kind = type(value)
            module = {"numpy.random.mtrand": "numpy.random", "numpy.random._generator": "numpy.random",
                      "torch._C": "torch"}.get(kind.__module__, kind.__module__)  # fmt: skip
            self._add(name, f"{module}.{kind.__name__}" if module in _LIBRARIES_OF_GENERATORS else "random.Random",
                      digests.digest(state))  # fmt: skip
        return True

    def _torch(self, name: str, value: Any, depth: int) -> bool:
        torch = digests.torch_module()
        if torch is None:
            return False
        if isinstance(value, torch.Tensor):
            self._tensor(name, value)
        elif isinstance(value, torch.nn.Module):
            self._module(name, value, depth)
        elif isinstance(value, torch.optim.Optimizer):
            self._state(name, "optimizer", value)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            self._state(name, "scheduler", value)
        elif hasattr(torch, "amp") and isinstance(value, torch.amp.GradScaler):
            self._state(name, "scaler", value)
        elif isinstance(value, torch.utils.data.DataLoader):
            self._loader(name, value, depth)
        elif isinstance(value, torch.utils.data.Sampler):
            for attribute, item in _fields(value).items():
                if isinstance(item, digests.PLAIN):
                    self._add(f"{name}.{attribute}", "sampler", digests.digest(item), repr(item))
                else:
                    self._visit(f"{name}.{attribute}", item, depth)
        elif isinstance(value, torch.utils.data.Dataset):
            self._attributes(name, _fields(value), depth)
        else:
            return False
        return True

    def _tensor(self, name: str, tensor: Any, kind: str = "") -> None:
        if _storage(tensor) in self._storages:
            return
        plain = tensor.numel() == 1 and not isinstance(tensor, sys.modules["torch"].nn.Parameter)
        self._add(name, kind or ("number" if plain else "tensor"), digests.tensor_digest(tensor), _brief(tensor))

    def _module(self, name: str, module: Any, depth: int) -> None:
        self._add(f"{name}<training>", "mode", digests.digest([part.training for part in module.modules()]))
        for path, tensor in module.named_parameters():
            self._seen[id(tensor)] = tensor
            self._tensor(f"{name}.{path}", tensor, "parameter")
            if tensor.requires_grad:
                gradient = "none" if tensor.grad is None else digests.tensor_digest(tensor.grad)
                self._add(f"{name}.{path}.grad", "gradient", gradient)
        for path, tensor in module.named_buffers():
            self._seen[id(tensor)] = tensor
            self._tensor(f"{name}.{path}", tensor, "buffer")
        of_every_module = vars(sys.modules["torch"].nn.Module())
        for path, part in module.named_modules():
            self._seen[id(part)] = part
            if is_users_class(type(part)):
                own_fields = {key: item for key, item in _fields(part).items() if key not in of_every_module}
                self._attributes(f"{name}.{path}" if path else name, own_fields, depth)

    def _loader(self, name: str, loader: Any, depth: int) -> None:
        if loader.num_workers:
            self._add(
                f"{name}<workers>", "workers", digests.digest(loader.num_workers), f"{loader.num_workers} workers"
            )
        for attribute in ("generator", "sampler", "batch_sampler", "dataset", "collate_fn"):
            self._visit(f"{name}.{attribute}", getattr(loader, attribute, None), depth)

    def _state(self, name: str, kind: str, value: Any) -> None:
        if id(value) in self._registered:
            return
        self._add(f"{name}<kind>", kind, type(value).__name__)
        for path, item in digests.leaves(value.state_dict()):
            self._add(f"{name}.{path}", kind, digests.digest(item), _brief(item))

    def _container(self, name: str, value: Any, depth: int) -> None:
        if digests.is_plain(value):
            kind = "dict" if isinstance(value, dict) else "list"
            self._add(name, kind, digests.digest(value), f"{len(value)} elements")
            return
        self._add(f"{name}<length>", "length", digests.digest(len(value)), f"{len(value)} elements")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in itertools.islice(list(items), MOST_ITEMS):
            self._visit(f"{name}[{key!r}]" if isinstance(key, digests.PLAIN) else f"{name}[...]", item, depth)

    def _closure(self, name: str, function: types.FunctionType, depth: int) -> None:
        if not is_users(function.__code__.co_filename):
            return
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._visit(f"{name}.{variable}", content, depth)
        for place, item in enumerate(function.__defaults__ or ()):
            if not isinstance(item, digests.PLAIN):
                self._visit(f"{name}.__defaults__[{place}]", item, depth)
        self._attributes(name, function.__dict__, depth)

    def _attributes(self, name: str, fields: Mapping[str, Any], depth: int) -> None:
        for attribute, item in list(fields.items()):
            if not (attribute.startswith("__") and attribute.endswith("__")):
                self._visit(f"{name}.{attribute}", item, depth)

    def _iterator(self, name: str, value: Any, depth: int) -> bool:
        parts = iterators.state(value)
        for suffix, item in parts or ():
            if isinstance(item, digests.PLAIN):
                self._add(f"{name}{suffix}", "iterator", digests.digest(item), repr(item))
            else:
                self._visit(f"{name}{suffix}", item, depth)
        return parts is not None

    def _file_position(self, name: str, file: Any) -> None:
        if file.closed or not file.readable() or not file.seekable():
            return
        self._add(f"{name}<position>", "file", digests.digest(file.tell()), f"at byte {file.tell()}")


_SKIPPED = (types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, BaseException)


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, in `__dict__` and in slots."""
    fields = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                fields.setdefault(slot, getattr(value, slot))
    return fields


def _tensors_of(value: Any) -> Iterator[Any]:
    torch = digests.torch_module()
    if torch is None or not callable(getattr(value, "state_dict", None)):
        return
    for _, item in digests.leaves(value.state_dict()):
        if isinstance(item, torch.Tensor):
            yield item


def _storage(tensor: Any) -> Any:
    try:
        return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _brief(value: Any) -> str:
    if isinstance(value, digests.PLAIN):
        return repr(value)
    shape = getattr(value, "shape", None)
    if shape is None:
        return ""
    if getattr(value, "numel", lambda: 0)() == 1 or getattr(value, "size", 0) == 1:
        return repr(value.item())
    return "x".join(str(size) for size in shape)
