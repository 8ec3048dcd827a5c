"""A hand-written MPIJob, without ortflow: for tests of the testbed and the image."""

from __future__ import annotations

from typing import Any

PROGRAM = """
import os, socket, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
for _ in range(int(sys.argv[1])):
    assert comm.allreduce(comm.rank + 1) == comm.size * (comm.size + 1) // 2
    time.sleep(1)
hosts = comm.gather(f"{socket.gethostname()} uid {os.getuid()}")
if comm.rank == 0:
    print("; ".join(hosts), MPI.Get_library_version().split()[0], flush=True)
"""
SSHD = """
cat > /tmp/sshd_config <<END
Port 2222
HostKey /home/ortflow/.ssh/id_rsa
AuthorizedKeysFile /home/ortflow/.ssh/authorized_keys
PidFile none
StrictModes no
UsePAM no
END
exec /usr/sbin/sshd -De -f /tmp/sshd_config
"""
LAUNCH = {
    "MPICH": "mpirun -localhost $(hostname -i) -launcher ssh -f /etc/mpi/hostfile -n 2 -ppn 1",
    "OpenMPI": "mpirun --hostfile /etc/mpi/hostfile -n 2",
}


def mpijob(
    name: str, *, mpi: str = "MPICH", image: str = "localhost/ortflow:testbed", seconds: int = 1
) -> dict[str, Any]:
    """Two workers of one rank, one on each node, which compute a sum once a second."""
    python = "/opt/ortflow/bin/python"
    security = {"runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True}

    def replica(count: int, restart: str, script: str, *arguments: str, **more: Any) -> dict[str, Any]:
        container: dict[str, Any] = {"name": "main", "image": image, "command": ["bash", "-c", script, *arguments]}
        if restart == "OnFailure":
            container["readinessProbe"] = {"tcpSocket": {"port": 2222}, "periodSeconds": 1}
        spec = {"terminationGracePeriodSeconds": 2, "securityContext": security, "containers": [container], **more}
        labels = {"spread": name} if restart == "OnFailure" else {}
        return {
            "replicas": count,
            "restartPolicy": restart,
            "template": {"metadata": {"labels": labels}, "spec": spec},
        }

    apart = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"spread": name}},
    }
    launch = f'{LAUNCH[mpi]} {python} -c "$0" {seconds}'
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": name},
        "spec": {
            "slotsPerWorker": 1,
            "mpiImplementation": mpi,
            "sshAuthMountPath": "/home/ortflow/.ssh",
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 6},
            "mpiReplicaSpecs": {
                "Launcher": replica(1, "Never", launch, PROGRAM),
                "Worker": replica(2, "OnFailure", SSHD, topologySpreadConstraints=[apart]),
            },
        },
    }
