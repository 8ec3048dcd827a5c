"""kill -9 of random processes of a program's run: each run ends with the bits of one that nobody touched.

ORTFLOW_TRIALS=100 pytest -m chaos tests/chaos/test_program_kills.py
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from program_runs import Programs

pytestmark = pytest.mark.chaos
TRIALS = int(os.environ.get("ORTFLOW_TRIALS", "10"))
STEPS = 30
CHAIN = f"""
    import hashlib, json, multiprocessing, time
    import ortflow.program

    def work(queue):
        while queue.get() is not None:
            pass

    def main():
        run = ortflow.program.context()
        run.total = {STEPS}
        step, value = 0, f"rank {{run.rank}}"
        if run.latest() is not None:
            step, value = json.loads((run.latest() / f"rank-{{run.rank}}.json").read_text())
        queue = multiprocessing.Queue()
        worker = multiprocessing.Process(target=work, args=(queue,))
        worker.start()
        while step < run.total:
            stop = run.should_stop
            time.sleep(0.02)
            queue.put(step)
            if not worker.is_alive():
                raise RuntimeError("the worker has ended")
            value = hashlib.sha256(value.encode()).hexdigest()
            step += 1
            run.log(step=step, loss=int(value[:8], 16) / 2**32)
            run.step(step)
            if stop or step % 5 == 0:
                with run.commit(step) as folder:
                    (folder / f"rank-{{run.rank}}.json").write_text(json.dumps([step, value]))
            if stop:
                break
        queue.put(None)
        worker.join()

    if __name__ == "__main__":
        main()
"""
SETTINGS = ("restart.failures=50", "restart.backoff.first=0.0", "restart.backoff.limit=0.0")


def result(programs: Programs) -> tuple[list[tuple[int, float]], list[str]]:
    """The losses, and the final state of both ranks."""
    folder = programs.folder / f"runs/train/checkpoints/step-{STEPS:08d}"
    losses = [(record["step"], record["loss"]) for record in programs.events("step")]
    return losses, [(folder / f"rank-{rank}.json").read_text() for rank in (0, 1)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, float]], list[str]]:
    programs = Programs(tmp_path_factory.mktemp("calm"))
    programs.write(CHAIN)
    code, output = programs.run("train.py", "--ranks", "2", *SETTINGS)
    assert code == 0, output
    return result(programs)


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_killed_run_ends_with_the_same_bits(
    trial: int, calm: tuple[list[tuple[int, float]], list[str]], tmp_path: Path
) -> None:
    chance = random.Random(trial)
    programs = Programs(tmp_path)
    programs.write(CHAIN)
    said = []
    for _ in range(20):
        process = programs.start("run", "train.py", "--ranks", "2", *SETTINGS)
        said.append(strike(process, chance))
        output, _ = process.communicate(timeout=120)
        if process.returncode == 0:
            break
    else:
        raise AssertionError(f"{said}\n{output}")
    end = time.monotonic() + 5
    while programs.left() and time.monotonic() < end:
        time.sleep(0.1)
    assert programs.left() == [], said
    assert json.dumps(result(programs)) == json.dumps(calm), said


def strike(process: subprocess.Popen[str], chance: random.Random) -> str:
    """After a random time, kill one process of the run, or none."""
    time.sleep(chance.uniform(0.5, 5.0))
    with suppress(psutil.Error):
        root = psutil.Process(process.pid)
        victim = chance.choice([root, *root.children(recursive=True)])
        command = " ".join(victim.cmdline())[-60:]
        victim.kill()
        return command
    return "nothing"
