"""JAX on two processes with a CPU each; the parameters are replicated, the batch is divided.

Arguments: level-1 (its own files) or level-2 (the program of docs/programs.md, in recipe.py); accidents: rank 1 is
killed in the first attempt, and asked to stop in the second. Prints what tests/torch/test_program_frameworks.py reads.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import ortflow.program

TOTAL, BATCH, EVERY, KILLED, STOPPED = 12, 8, 3, 5, 7


def fresh() -> dict[str, Any]:
    """The state before the first step."""
    keys = jax.random.split(jax.random.key(1), 3)
    weights = {"w1": jax.random.normal(keys[0], (4, 16)) / 2, "w2": jax.random.normal(keys[1], (16, 1)) / 4}
    momenta = jax.tree.map(jnp.zeros_like, weights)
    return {"weights": weights, "momenta": momenta, "key": jax.random.key_data(keys[2])}


def inputs_of(step: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The whole batch of a step."""
    return np.random.default_rng(step).standard_normal((BATCH, 4), dtype=np.float32)


def loss_of(weights: dict[str, Any], inputs: Any, kept: Any) -> Any:
    """The loss, with dropout of the first layer's outputs."""
    outputs = (jnp.tanh(inputs @ weights["w1"]) * kept) @ weights["w2"]
    return jnp.square(outputs - jnp.square(inputs).sum(1, keepdims=True)).mean()


@jax.jit
def update(tree: dict[str, Any], inputs: Any) -> tuple[Any, Any]:
    """One step of SGD with momentum."""
    key, used = jax.random.split(jax.random.wrap_key_data(tree["key"]))
    kept = jax.random.bernoulli(used, 0.8, (BATCH, 16))
    loss, gradients = jax.value_and_grad(loss_of)(tree["weights"], inputs, kept)
    momenta = jax.tree.map(lambda momentum, gradient: 0.9 * momentum + gradient, tree["momenta"], gradients)
    weights = jax.tree.map(lambda weight, momentum: weight - 0.01 * momentum, tree["weights"], momenta)
    return {"weights": weights, "momenta": momenta, "key": jax.random.key_data(key)}, loss


def say(*words: object) -> None:
    """Print a line in one piece."""
    print(" ".join(map(str, words)) + "\n", end="", flush=True)


def own_steps() -> Iterator[int]:
    """Level 1: the steps that are left."""
    run.total, begun = TOTAL, run.position
    for step in range(begun, TOTAL):
        stop = run.should_stop
        if stop or (step > begun and step % EVERY == 0):
            with run.commit(step) as folder:
                if run.rank == 0:
                    np.savez(folder / "state.npz", *jax.tree.leaves(jax.tree.map(np.asarray, state.tree)))
        if stop:
            raise SystemExit
        yield step
        run.step(step + 1)


def train(step: int) -> None:
    """A step."""
    divided = NamedSharding(everywhere.mesh, PartitionSpec("data"))
    part = np.split(inputs_of(step), run.world_size)[run.rank]
    state.tree, loss = update(state.tree, jax.make_array_from_process_local_data(divided, part))
    say("step", step, "jax", float(loss))
    if "accidents" in sys.argv and run.rank == 1 and (run.attempt, step) == (0, KILLED):
        os.kill(os.getpid(), signal.SIGKILL)
    if "accidents" in sys.argv and run.rank == 1 and (run.attempt, step) == (1, STOPPED):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)  # the ranks agree within a fraction of it


total, loader = TOTAL, range(TOTAL)
try:
    if "level-1" in sys.argv:
        run = ortflow.program.start(jax=True)
        everywhere = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec())
        tree = fresh()
        if run.latest() is not None:
            with np.load(run.latest() / "state.npz") as saved:
                tree = jax.tree.unflatten(jax.tree.structure(tree), [saved[name] for name in saved])
            run.step(int(run.latest().name.rpartition("-")[2]))
        tree = jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(everywhere, np.asarray(leaf)), tree)
        state = SimpleNamespace(tree=tree)
        for step in own_steps():
            train(step)
    else:
        exec(Path("recipe.py").read_text())
except SystemExit:
    say("stopped", run.position)
    raise
assert (jax.process_count(), jax.process_index()) == (run.world_size, run.rank)

digest = sha256()
for leaf in jax.tree.leaves(jax.tree.map(np.asarray, state.tree)):
    digest.update(leaf.tobytes())
say("final", "jax", digest.hexdigest())
if run.rank == 0:
    tree = jax.tree.map(np.asarray, fresh())
    with jax.default_device(jax.local_devices()[0]):
        for step in range(TOTAL):
            tree, loss = update(tree, inputs_of(step))
            say("plain", step, float(loss))
