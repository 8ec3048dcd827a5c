"""Memory of the GPUs of one machine that ranks open for each other, by CUDA's interprocess handles."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ortflow.workflow.comm import Communicator, first_of
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import CudaError

MOST_RANKS = 8
"""GPUs of one machine that reach each other directly."""


class PeerMemory:
    """What all ranks have opened. `addresses[rank]` is where this process finds that rank's allocations."""

    def __init__(self, below: Communicator, device: CudaDevice, addresses: Sequence[Sequence[int]]) -> None:
        self._below, self._device, self.addresses = below, device, addresses

    def close(self) -> None:
        """Close what other ranks have opened, which they may free when this returns. Collective."""
        _close(self._device, self.addresses, self._below.rank)
        self._below.barrier()


def connect(below: Communicator, device: CudaDevice, allocations: Sequence[int]) -> PeerMemory | str:
    """Open each other's allocations. Collective: what one rank cannot do, none does.

    Parameters
    ----------
    below
        The ranks, all on one machine, without their GPUs.
    device
        This rank's GPU.
    allocations
        Addresses of whole allocations of `Runtime.allocate`, as many on each rank.

    Returns
    -------
    PeerMemory or str
        The memory, or why there is none.
    """
    # Set where peer access between the GPUs does not work: copies would fail as NCCL's do.
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        exported: tuple[list[bytes], str] = [], "NCCL_P2P_DISABLE is set"
    elif below.world_size > MOST_RANKS:
        exported = [], f"{below.world_size} ranks are more than {MOST_RANKS}"
    else:
        try:
            exported = [device.here().handle_of(allocation) for allocation in allocations], ""
        except CudaError as error:
            exported = [], error.message
    every: Sequence[tuple[list[bytes], str]] = below.broadcast_object(below.gather(exported))
    if refused := next((reason for _, reason in every if reason), ""):
        return refused
    opened, trouble = list[list[int]](), ""
    try:
        for rank, (handles, _) in enumerate(every):
            opened.append([])
            for place, handle in enumerate(handles):
                opened[-1].append(allocations[place] if rank == below.rank else device.here().open_handle(handle))
    except CudaError as error:
        trouble = f"rank {below.rank} cannot open the memory of rank {len(opened) - 1}: {error.message}"
    if (first := first_of(below, trouble)) is not None:
        _close(device, opened, below.rank)
        below.barrier()
        return first
    return PeerMemory(below, device, opened)


def _close(device: CudaDevice, addresses: Sequence[Sequence[int]], own_rank: int) -> None:
    for rank, handles in enumerate(addresses):
        for address in handles if rank != own_rank else ():
            device.here().close_handle(address)
