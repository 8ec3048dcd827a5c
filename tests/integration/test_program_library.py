"""Programs of level 2 in real local runs: stopped while a rank sleeps, killed with SIGKILL; their state is exact."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
from program_runs import Programs
from waits import PATIENCE, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups and adoption of orphans are Linux's")

PROGRAM = """
    import os, random, socket, sys, time
    import ortflow.program

    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        listener = socket.create_server(address)
        link, _ = listener.accept()
    else:
        while True:
            try:
                link = socket.create_connection(address)
                break
            except OSError:
                time.sleep(0.02)

    def barrier():
        link.sendall(b"x")
        assert link.recv(1) == b"x", "the other rank has ended"

    class Walk:
        "State that depends on every batch and on random numbers."
        value = 0.0
        def state_dict(self):
            return {"value": self.value}
        def load_state_dict(self, state):
            self.value = state["value"]

    total, slow = int(sys.argv[1]), float(sys.argv[2])
    walk = Walk()
    run = ortflow.program.start(walk=walk)
    random.seed(run.rank)
    sampler = ortflow.program.Sampler(101, batch=10, seed=4)
    print("begins after", run.position, flush=True)
    for samples in run.steps(sampler, total=total):
        walk.value += random.random() * sum(samples)
        run.log(loss=walk.value)
        print("step", run.position, flush=True)
        time.sleep(slow if run.rank == 1 else 0.01)
        barrier()  # as a collective: rank 0 waits here for rank 1
    print("final", walk.value.hex(), flush=True)
"""


def programs_in(folder: object) -> Programs:
    programs = Programs(folder)  # type: ignore[arg-type]
    programs.write(PROGRAM)
    return programs


def finals(programs: Programs, attempt: int) -> list[str]:
    return [next(x for x in programs.log(r, attempt=attempt).splitlines() if x.startswith("final")) for r in (0, 1)]


def test_a_stop_takes_one_step_and_the_run_continues_exactly(tmp_path_factory: pytest.TempPathFactory) -> None:
    programs = programs_in(tmp_path_factory.mktemp("stopped"))
    process = programs.start("run", "train.py", "--ranks", "2", "program.args=['8','1.0']")
    wait_for(programs, "step 2")
    process.send_signal(signal.SIGTERM)
    asked = max(int(line.split()[1]) for line in programs.log(1).splitlines() if line.startswith("step"))
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, output
    logs = [programs.log(rank).splitlines() for rank in (0, 1)]
    steps = {[line for line in log if line.startswith("step")][-1] for log in logs}
    assert len(steps) == 1
    assert not any(line.startswith("final") for log in logs for line in log)
    step = int(steps.pop().split()[1]) + 1
    assert (programs.folder / f"runs/train/checkpoints/step-{step:08d}/COMMITTED").exists()
    assert step - 1 <= asked + 3  # that step of a second; on a machine with other work, the request may need two more

    code, output = programs.run("train.py", "--ranks", "2", "program.args=['8','0.0']")
    assert code == 0, output
    assert f"begins after {step}" in programs.log(1, attempt=1)
    calm = programs_in(tmp_path_factory.mktemp("calm"))
    code, output = calm.run("train.py", "--ranks", "2", "program.args=['8','0.0']")
    assert code == 0, output
    assert finals(programs, 1) == finals(calm, 0)
    assert [record["step"] for record in programs.events("step")] == [*range(1, 9)]
    assert programs.left() == []


def wait_for(programs: Programs, text: str, rank: int = 1) -> None:
    def there() -> bool:
        try:
            return text in programs.log(rank)
        except FileNotFoundError:
            return False

    wait_until(there)


def test_sigkill_of_a_program_restarts_the_run_exactly(tmp_path_factory: pytest.TempPathFactory) -> None:
    arguments = (
        "train.py",
        "--ranks",
        "2",
        "program.args=['60','0.02']",
        "checkpoint.every_steps=7",
        "restart.failures=9",
    )
    calm = programs_in(tmp_path_factory.mktemp("calm"))
    code, output = calm.run(*arguments)
    assert code == 0, output
    programs = programs_in(tmp_path_factory.mktemp("killed"))
    process = programs.start("run", *arguments)
    generator, attempt = random.Random(1), 0
    for attempt in range(3):
        if not has_begun(programs, attempt, process):
            break
        time.sleep(generator.uniform(0.1, 0.6))
        kill_program(programs, rank=attempt % 2)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    attempts = sorted((programs.folder / "runs/train/logs").iterdir())
    assert len(attempts) > 1
    assert finals(programs, len(attempts) - 1) == finals(calm, 0)
    assert programs.left() == []


def has_begun(programs: Programs, attempt: int, process: subprocess.Popen[str]) -> bool:
    """Wait for an attempt; False if the run has ended before, as it may between two kills on a busy machine."""

    def there() -> bool:
        try:
            return "begins after" in programs.log(1, attempt=attempt)
        except FileNotFoundError:
            return False

    wait_until(lambda: there() or process.poll() is not None)
    return there()


def kill_program(programs: Programs, rank: int) -> None:
    """SIGKILL of the Python that runs train.py as this rank."""
    root = str(programs.folder / "runs" / "train")
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            mine = variables.get("ORTFLOW_RUN_DIR") == root and variables.get("RANK") == str(rank)
            if mine and any(part.endswith("train.py") for part in process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
        except (psutil.Error, OSError):
            continue
