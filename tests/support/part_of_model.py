"""A rank under mpirun that runs its part of a model once: `part_of_model.py FOLDER CHANNEL SEED`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def main(folder: Path, channel: int, seed: int) -> None:
    """Read graph and inputs of this rank from the folder, and write its outputs there."""
    from ortflow.workflow.comm.mpi import MpiCommunicator
    from ortflow.workflow.device.cpu import CpuDevice
    from ortflow.workflow.kernels.library import find_library
    from ortflow.workflow.onnx_runtime import onnxruntime
    from ortflow.workflow.sessions import collectives
    from ortflow.workflow.sessions.session import Sessions

    world, library = MpiCommunicator(), find_library().path
    assert library is not None
    collectives.connect(library, {channel: world.subset(range(world.world_size))})
    session = Sessions(CpuDevice(), 1, "error", library).open((folder / f"{world.rank}.onnx").read_bytes())
    given = dict(np.load(folder / f"{world.rank}.npz"))
    onnxruntime.set_seed(seed)
    results = session.run(None, {value.name: given[value.name] for value in session.get_inputs()})
    names = [value.name for value in session.get_outputs()]
    np.savez(folder / f"{world.rank}-results.npz", **dict(zip(names, results, strict=True)))
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
