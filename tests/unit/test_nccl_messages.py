"""Messages for NCCL's failures: the meaning of its warnings, in a rank's error, a log, and an attempt's cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from messages import says

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.attempts.nccl_log import TAIL, explained
from ortflow.launchers.records import Outcome
from ortflow.workflow.comm.nccl_messages import CODES, TABLE, in_log, sentence, trouble
from ortflow.workflow.run.rundir import RunDir

SHM = "Error while creating shared memory segment /dev/shm/nccl-VPyhzw (size 21823872), error: No space left on device"
SEEN = {
    # as NCCL 2.9 to 2.28 print them
    SHM: "backends.kubernetes.shared_memory",
    "Error: failed to extend /dev/shm/nccl-UbzKZ9 to 9637892 bytes": "NCCL_SHM_DISABLE=1",
    "Call to posix_fallocate failed : No space left on device": "--shm-size=1g",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000": "resources.ranks_per_node",
    "Bootstrap : no socket interface found": "NCCL_SOCKET_IFNAME",
    "socketStartConnect: Connect to 10.0.0.7<43210> failed : Connection timed out": "NCCL_SOCKET_IFNAME",
    "Call to connect returned No route to host, retrying": "NCCL_SOCKET_IFNAME",
    "socketProgress: Connection closed by remote peer node2<41000>": "logs of the other ranks",
    "NET/IB: Got completion from peer 10.0.0.7<35221> with status=12 opcode=0 len=0": "NCCL_IB_DISABLE=1",
    "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1": "NCCL_IB_DISABLE=1",
    "Call to ibv_reg_mr failed with error Cannot allocate memory": "IPC_LOCK",
    "Cuda failure 217 'peer access is not supported between these two devices'": "NCCL_P2P_DISABLE=1",
    "Cuda failure 101 'invalid device ordinal'": "gpu_bind: closest",
    "Cuda failure 2 'out of memory'": "data.micro_batch",
    "Cuda failure 'out of memory'": "NCCL_BUFFSIZE",
    "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401": "NCCL_NVLS_ENABLE=0",
    "Cuda failure 802 'system not yet initialized'": "nvidia-fabricmanager",
    "Mismatched NCCL version detected : rank 0 version 22803 rank 1 version 22205": "environment or image",
    "Message truncated : received 1024 bytes instead of 256": "run file and model",
    "Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'": "update",
}


@pytest.mark.parametrize("words", SEEN)
def test_a_warning(words: str) -> None:
    known = trouble(words)
    assert known is not None
    assert SEEN[words] in known.fix
    line = f"n1:2144:2556 [2] misc/shmutils.cc:88 NCCL WARN {words}\n"
    assert (
        in_log(f"opset 20\nn1:1:1 [0] NCCL INFO Bootstrap : Using eth0\n{line}n1:1:1 NCCL INFO x.cc:33 -> 2\n") == known
    )


def test_every_row_is_seen() -> None:
    reported = {trouble(words) for words in SEEN}
    assert {known.what for known in reported if known is not None} == {what for _, what, _ in TABLE}


def test_a_sentence_of_a_rank() -> None:
    system = "unhandled system error (run with NCCL_DEBUG=INFO for details)"
    reported = sentence("ncclCommInitRank", system, f"{SHM}\n")
    assert says(reported, "… ncclCommInitRank: /dev/shm … (Error while creating")
    assert reported.endswith("or set NCCL_SHM_DISABLE=1")
    for error, meaning in CODES.items():
        reported = sentence("ncclAllReduce", error)
        assert reported.startswith("NCCL failed in ncclAllReduce: ")
        assert meaning in reported
    unknown = sentence("ncclAllReduce", "a new error", "a new warning")
    assert says(unknown, "… ncclAllReduce: a new error (a new warning) … NCCL_DEBUG=INFO")


def test_harmless_lines() -> None:
    assert in_log("n1:1:1 [0] NCCL INFO NVLS multicast support is not available on dev 0\nConnection refused\n") is None
    assert in_log("n1:1:1 [0] NCCL WARN something that nobody knows\n") is None
    assert trouble("") is None


def test_the_cause_of_an_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for rank in range(3):
        run.log(0, rank).parent.mkdir(parents=True, exist_ok=True)
        run.log(0, rank).write_text("NCCL version 2.28\n")
    failed = Cause(Outcome.FAILURE, 1, "rank 0 was killed by SIGABRT", 0)
    assert explained(failed, run, 0, 3) == failed
    run.log(0, 2).write_text("x" * 2 * TAIL + f"\nn1:1:1 [0] NCCL WARN {SHM}\n")
    found = explained(failed, run, 0, 3)
    assert says(found.sentence, "rank 0 … SIGABRT … NCCL … /dev/shm … raise")
    assert explained(found, run, 0, 3) == found
    left = Cause(Outcome.PREEMPTED, 75, "saved and stopped")
    assert explained(left, run, 0, 3) == left
    run.log(0, 2).unlink()
    run.log(0, 2).mkdir()
    assert explained(failed, run, 0, 9) == failed
