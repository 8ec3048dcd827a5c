"""A checkpoint of level 2: the registered objects, the random states and the loader's position, of every rank.

    step-00000040/
      tensors/          tensors that all ranks share, by torch.distributed.checkpoint
      rank-00000.state  the rest, one file for each rank; pickled, and by torch.save in a program with torch
      NAME/             a DeepSpeed engine's own files (`engines`)

Called by `Run`. Written inside `Context.commit`.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from ortflow.program import engines, registry, trees
from ortflow.program.errors import ProgramError
from ortflow.program.trees import TensorPlace
from ortflow.program.world import World

FORMAT = 1
FIRST = "rank-00000.state"


def save(folder: Path, objects: dict[str, Any], rest: dict[str, Any], place: World) -> None:
    """Write this rank's part of a checkpoint. A collective of torch.distributed where that is initialised.

    rest
        What else the rank needs to continue.
    """
    own_savers, objects = engines.split(objects)
    for name, engine in own_savers.items():
        engines.save(folder, name, engine)
    states = {name: registry.state(value) for name, value in objects.items()}
    content: dict[str, Any] = {"format": FORMAT, "world_size": place.size, "own": {}, "differing": None, **rest}
    if _torch() is None:
        content["objects"] = states
    else:
        from ortflow.program import tensors

        content["objects"], values = tensors.take_apart(states)
        for name, value in objects.items():
            if registry.is_optimizer(value):
                tensors.check_sharding(name, values, registry.parameters(value))
        if tensors.together():
            rest_of_each = {f"{name}=": trees.digest(tree) for name, tree in content["objects"].items()}
            differing = tensors.differing({**tensors.digests(values), **rest_of_each})
            content["own"] = {key: value.clone() for key, value in values.items() if key in differing}
            content["differing"] = sorted(differing - _buffers(objects))
        elif place.size > 1:  # several ranks that torch.distributed does not connect
            content["own"] = {key: value.clone() for key, value in values.items()}
        else:
            content["differing"] = []
        tensors.save({key: value for key, value in values.items() if key not in content["own"]}, folder)
    content["objects"] |= {name: engines.identity(engine) for name, engine in own_savers.items()}
    if own_savers and content["differing"] is not None:
        content["differing"] = sorted({*content["differing"], *own_savers})
    with open(folder / f"rank-{place.rank:05d}.state", "wb") as file:
        if _torch() is None:
            pickle.dump(content, file)
        else:
            _torch().save(content, file)


def is_of_level_two(folder: Path) -> bool:
    """Whether a checkpoint was saved by `Run.steps`."""
    return (folder / FIRST).exists()


def not_of_level_two(folder: Path) -> str:
    """The sentence about one that was not."""
    return f"{folder} was not saved by run.steps: load it with run.latest(), or remove it"


def read(folder: Path, place: World) -> dict[str, Any]:
    """Return what a rank saved: this rank's, or in another number of ranks one that stands for it.

    Raises ProgramError if this is not a checkpoint of level 2.
    """
    if not is_of_level_two(folder):
        raise ProgramError(not_of_level_two(folder))
    content = _unpickle(folder / FIRST)
    if content["format"] != FORMAT:
        raise ProgramError(f"{folder} has format {content['format']}; this version of ortflow reads {FORMAT}")
    number = place.rank % content["world_size"]
    return content if number == 0 else _unpickle(folder / f"rank-{number:05d}.state")


def load(folder: Path, content: dict[str, Any], objects: dict[str, Any], place: World) -> None:
    """Set the objects' state. A collective of torch.distributed where that is initialised. Raises ProgramError."""
    saved: dict[str, Any] = content["objects"]
    _check_ranks(content, place)
    own_savers, objects = engines.split(objects)
    for name, value in objects.items():
        if registry.is_module(value):
            registry.check_module(name, value, saved[name])
        elif registry.is_optimizer(value):
            registry.check_optimizer(name, value, saved[name])
    if _torch() is not None:
        from ortflow.program import tensors

        own_tensors = content["own"]
        targets: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for name, value in objects.items():
            for stored, template in _places(name, value, saved[name]):
                if stored.key in own_tensors:
                    values[stored.key] = own_tensors[stored.key].to(tensors.device(stored))
                elif registry.is_module(value) and template.dtype == stored.dtype:
                    targets[stored.key] = template.detach()  # in place: a second copy of a model may not fit
                else:
                    targets[stored.key] = tensors.target(stored, template)
        tensors.load(targets, folder)
        saved = {name: tensors.put_together(saved[name], {**targets, **values}) for name in objects}

    for name, engine in own_savers.items():
        engines.load(folder, name, engine, content["objects"][name])

    # Modules first: loading a schedule may look at its optimizer, and an optimizer at its parameters.
    def order(name: str) -> tuple[bool, bool]:
        return not registry.is_module(objects[name]), not registry.is_optimizer(objects[name])

    for name in sorted(objects, key=order):
        registry.set_state(name, objects[name], saved[name])


def _check_ranks(content: dict[str, Any], place: World) -> None:
    if content["world_size"] == place.size:
        return
    change = f"the checkpoint is of {content['world_size']} ranks, and this run has {place.size}"
    if content["differing"] is None:
        raise ProgramError(f"{change}: only ranks that torch.distributed connects can become more or fewer")
    if content["differing"]:
        names = ", ".join(content["differing"][:3]).replace("=", "")
        raise ProgramError(f"{change}, but each rank had its own {names}: resume with {content['world_size']} ranks")


def _places(name: str, value: Any, tree: Any) -> list[tuple[TensorPlace, Any]]:
    """The stored tensors of an object, each with a tensor of the program that is like it, or None."""
    places = [(path, leaf) for path, leaf in trees.leaves(tree) if isinstance(leaf, TensorPlace)]
    if registry.is_optimizer(value):
        by_number = {str(number): parameter for number, parameter in enumerate(registry.parameters(value))}

        def like(path: str) -> Any:
            _, number, *key = path.split(".")
            return by_number.get(number) if path.startswith("state.") and key != ["step"] else None

        return [(leaf, like(path)) for path, leaf in places]
    now = registry.tensors_of(value)
    return [(leaf, now.get(path)) for path, leaf in places]


def _buffers(objects: dict[str, Any]) -> set[str]:
    """Keys of modules' buffers: statistics of the rank's own samples, for which those of any rank can stand."""
    keys = set()
    for name, value in objects.items():
        if registry.is_module(value):
            pointers = {buffer.data_ptr() for buffer in value.buffers() if type(buffer).__name__ == "Tensor"}
            for key, leaf in registry.state(value).items():
                if type(leaf).__name__ == "Tensor" and leaf.data_ptr() in pointers:
                    keys.add(f"{name}.{key}")
    return keys


def _unpickle(path: Path) -> dict[str, Any]:
    torch = _torch()
    with open(path, "rb") as file:
        # The run's own file, whose hash was verified: it has more than tensors.
        content: dict[str, Any] = (
            # By default torch loads a tensor to the device that it was saved from, which may be another rank's GPU.
            torch.load(file, weights_only=False, map_location="cpu") if torch else pickle.load(file)
        )
    return content


def _torch() -> Any:
    return sys.modules.get("torch")
