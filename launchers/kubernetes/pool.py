"""The hosts of an elastic run: those that answer take part in an attempt. Used by the supervisor process.

The operator keeps as many workers as the run has nodes, and creates a lost one again. So the MPIJob never changes:
mpirun is started over the hosts that are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ortflow.launchers.kubernetes.hosts import addresses, short


class HostPool:
    """The hosts that the operator gives to a run.

    Parameters
    ----------
    hosts
        Their names, in the operator's order.
    port
        The port of their ssh daemon.
    leaves
        Whether a host, by name and address, answers and must not be used.
    node
        The node that a host is on now.
    """

    state = "missing"

    def __init__(
        self,
        hosts: Sequence[str],
        port: int,
        leaves: Callable[[str, str], bool],
        node: Callable[[str], str] = short,
    ) -> None:
        self.names: Sequence[str] = list(hosts)
        self._port, self._leaves, self._node = port, leaves, node
        self.addresses: dict[str, str] = {}
        """Address of each host that was there when it was last looked for."""

    def shown(self, name: str) -> str:
        """The pod's name."""
        return short(name)

    def node(self, name: str) -> str:
        """The machine that its pod is on: another pod of this name may be elsewhere."""
        return self._node(name)

    def present(self, among: Sequence[str]) -> list[str]:
        """Those that answer and are not about to end."""
        if not among:
            return []
        for host, address in addresses(among, self._port).items():
            if address is not None and not self._leaves(host, address):
                self.addresses[host] = address
            else:
                self.addresses.pop(host, None)
        return [host for host in among if host in self.addresses]
