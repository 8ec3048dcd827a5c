"""Tensors of a checkpoint: those that all ranks share go through torch.distributed.checkpoint, the others stay by rank.

Imported only in a program that has imported torch. A sharded tensor (DTensor: FSDP2, tensor parallelism) is shared by
nature. A plain tensor is stored once if all ranks have the same bits, as parameters have under DDP, and by rank if not,
as running statistics may: torch.distributed.checkpoint keeps one rank's copy of a plain tensor without a comparison.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from ortflow.program import trees
from ortflow.program.errors import ProgramError
from ortflow.program.trees import TensorPlace

HEAD = 1 << 16
"""Elements of a tensor whose order counts in its digest; of the others the sum does."""
FOLDER = "tensors"


def together() -> bool:
    """Whether the ranks can compare their state and save it together."""
    return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)


def take_apart(states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the trees with places for their tensors, and the tensors by key."""
    tensors: dict[str, torch.Tensor] = {}

    def change(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_quantized:
            return leaf
        key = path
        while key in tensors:  # {"a.b": …, "a": {"b": …}}
            key += "'"
        tensors[key] = leaf.detach()
        return TensorPlace(key, tuple(leaf.shape), leaf.dtype, leaf.device.type)

    return {name: trees.replace(state, change, name) for name, state in states.items()}, tensors


def put_together(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the tree with its tensors."""
    return trees.replace(tree, lambda _, leaf: tensors[leaf.key] if isinstance(leaf, TensorPlace) else leaf)


def differing(digests: dict[str, Any]) -> set[str]:
    """Return the keys that do not have the same digest on every rank. A collective."""
    everyone: list[dict[str, Any]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(everyone, digests)
    keys = set().union(*everyone)
    return {key for key in keys if any(other.get(key, other) != everyone[0].get(key, None) for other in everyone)}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return for each plain tensor numbers that differ if its bits do; for a sharded one its size alone."""
    sums: dict[str, list[torch.Tensor]] = {}
    by_device: dict[str, list[tuple[str, tuple[Any, ...]]]] = {}
    result: dict[str, Any] = {}
    for key, tensor in tensors.items():
        size = (tuple(tensor.shape), str(tensor.dtype))
        if isinstance(tensor, DTensor):
            result[key] = (*size, "sharded")
            continue
        bits = _bits(tensor)
        head = bits[:HEAD].to(torch.int64)
        weights = torch.arange(1, len(head) + 1, device=head.device)
        device = str(tensor.device)
        sums.setdefault(device, []).append(torch.stack([bits.sum(dtype=torch.int64), (head * weights).sum()]))
        by_device.setdefault(device, []).append((key, size))
    for device, entries in by_device.items():
        numbers = torch.stack(sums[device]).tolist()  # one copy from a GPU, not one for each tensor
        result.update({key: (*size, *pair) for (key, size), pair in zip(entries, numbers, strict=True)})
    return result


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, in one row."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        # torch conjugates lazily, by a flag of the view: the memory still has the other numbers.
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.contiguous().view(integers[flat.element_size()])


def save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the shared tensors. A collective where there are several ranks."""
    if not tensors:
        return
    import torch.distributed.checkpoint as dcp

    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with _quiet():
        dcp.save(dict(tensors), checkpoint_id=folder / FOLDER, planner=planner, no_dist=not together())


def load(targets: dict[str, torch.Tensor], folder: Path) -> None:
    """Read the shared tensors into the given ones, sharded as these are. A collective where there are several ranks."""
    if not targets:
        return
    import torch.distributed.checkpoint as dcp

    with _quiet():
        dcp.load(targets, checkpoint_id=folder / FOLDER, no_dist=not together())


class _quiet(warnings.catch_warnings):  # noqa: N801  # a context manager
    """Without torch's warnings that one process saves alone and that a folder exists: both are meant."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")


def target(place: TensorPlace, template: torch.Tensor | None) -> torch.Tensor:
    """Return an uninitialised tensor for a stored one, sharded as `template` if that has its shape."""
    if template is not None and tuple(template.shape) == place.shape:
        return torch.empty_like(template, dtype=place.dtype, requires_grad=False)
    return torch.empty(place.shape, dtype=place.dtype, device=device(place))


def device(place: TensorPlace) -> torch.device:
    """Return this rank's device of the kind on which a tensor was."""
    if place.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(place.device)


def check_sharding(name: str, tensors: dict[str, torch.Tensor], parameters: list[Any]) -> None:
    """Refuse optimizer state that is sharded and has not the shape of its parameter: where to load it is not known."""
    for key, tensor in tensors.items():
        _, _, rest = key.partition(f"{name}.state.")
        number = rest.partition(".")[0]
        if isinstance(tensor, DTensor) and number.isdigit() and tensor.shape != parameters[int(number)].shape:
            raise ProgramError(
                f"start({name}=…): {key} is sharded, and has not the shape of its parameter; save this optimizer with "
                "run.commit and torch.distributed.checkpoint"
            )
