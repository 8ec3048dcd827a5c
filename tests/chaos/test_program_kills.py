"""kill -9 of random processes of a program's run: each run ends with the bits of one that nobody touched.

    ORTFLOW_TRIALS=100 pytest -s -m chaos tests/chaos/test_program_kills.py

100 runs with about two kills each, and where torch is installed 20 with its loader workers. The victims: launcher,
mpirun, rank's process, its guard, program, loader worker. The moment is uniform over the time of a calm run, start and
end included; in every third run it is in a commit. At the end, `-s` shows what was hit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from program_runs import Programs
from waits import PATIENCE

pytestmark = pytest.mark.chaos
TRIALS = int(os.environ.get("ORTFLOW_TRIALS", "10"))
KINDS = ("launcher", "mpirun", "rank", "guard", "program", "worker")
STEPS = 30
CHAIN = f"""
    import hashlib, json, multiprocessing, queue, time
    import ortflow.program

    def work(wanted, made):
        while (index := wanted.get()) is not None:
            made.put(hashlib.sha256(b"%d" % index).hexdigest())

    def batch(worker, made):
        while True:
            try:
                return made.get(timeout=0.2)
            except queue.Empty:
                if not worker.is_alive():
                    raise RuntimeError("the worker has ended") from None

    def main():
        run = ortflow.program.context()
        run.total = {STEPS}
        step, value = 0, f"rank {{run.rank}}"
        if run.latest() is not None:
            step, value = json.loads((run.latest() / f"rank-{{run.rank}}.json").read_text())
        wanted, made = multiprocessing.Queue(), multiprocessing.Queue()
        worker = multiprocessing.Process(target=work, args=(wanted, made), daemon=True)
        worker.start()
        while step < run.total:
            stop = run.should_stop
            time.sleep(0.03)
            wanted.put(step)
            value = hashlib.sha256((value + batch(worker, made)).encode()).hexdigest()
            step += 1
            run.log(step=step, loss=int(value[:8], 16) / 2**32)
            run.step(step)
            if stop or step % 5 == 0:
                with run.commit(step) as folder:
                    (folder / f"rank-{{run.rank}}.json").write_text(json.dumps([step, value]))
                    time.sleep(0.02)
            if stop:
                break
        wanted.put(None)
        worker.join()

    if __name__ == "__main__":
        main()
"""
LOADER = f"""
    import torch
    import ortflow.program

    class Noise(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return index + torch.randn(4)

    def main():
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        sampler = ortflow.program.Sampler(64, batch=8, seed=1)
        loader = torch.utils.data.DataLoader(Noise(), batch_sampler=sampler, num_workers=2)
        run = ortflow.program.start(model=model, optimizer=optimizer)
        for inputs in run.steps(loader, total={STEPS}):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss.item())
        flat = torch.cat([each.flatten() for each in model.parameters()])
        with open(f"{{ortflow.program.context().checkpoint_dir}}/../state-{{run.rank}}", "w") as file:
            print(flat.tolist(), file=file)

    if __name__ == "__main__":
        main()
"""
SETTINGS = ("restart.failures=50", "restart.backoff.first=0.0", "restart.backoff.limit=0.0")
PROGRAMS = {"chain": (CHAIN, ()), "loader": (LOADER, ("checkpoint.every_steps=5",))}
CASES = [("chain", trial) for trial in range(TRIALS)]
if importlib.util.find_spec("torch") is not None:
    CASES += [("loader", trial) for trial in range(TRIALS // 5)]


def results(programs: Programs, name: str) -> tuple[list[tuple[int, float]], list[str]]:
    """The losses, and the final state of both ranks."""
    root = programs.folder / "runs/train"
    last = root / f"checkpoints/step-{STEPS:08d}"
    states = [last / f"rank-{rank}.json" if name == "chain" else root / f"state-{rank}" for rank in (0, 1)]
    losses = [(record["step"], record["loss"]) for record in programs.events("step")]
    return losses, [state.read_text() for state in states]


@dataclass
class Calm:
    """Runs that nobody touched, by program: what they make, and how long they take."""

    folder: Path
    made: dict[str, tuple[str, float]] = field(default_factory=dict)

    def of(self, name: str) -> tuple[str, float]:
        if name not in self.made:
            (self.folder / name).mkdir()
            programs = Programs(self.folder / name)
            programs.write(PROGRAMS[name][0])
            begun = time.monotonic()
            code, output = programs.run("train.py", "--ranks", "2", *SETTINGS, *PROGRAMS[name][1])
            assert code == 0, output
            self.made[name] = json.dumps(results(programs, name)), time.monotonic() - begun
        return self.made[name]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return Calm(tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="module")
def hits() -> Iterator[Counter[str]]:
    counted: Counter[str] = Counter()
    yield counted
    print("\nkilled:", ", ".join(f"{count} {what}" for what, count in sorted(counted.items())))


@pytest.mark.rotates
@pytest.mark.parametrize(("name", "trial"), CASES)
def test_a_killed_run_ends_with_the_same_bits(
    name: str, trial: int, calm: Calm, hits: Counter[str], tmp_path: Path
) -> None:
    chance = random.Random(f"{name} {trial}")
    text, settings = PROGRAMS[name]
    expected, seconds = calm.of(name)
    programs = Programs(tmp_path)
    programs.write(text)
    victims = [KINDS[trial % len(KINDS)], *chance.choices(KINDS, k=chance.choice((0, 1, 2)))]
    killed: list[str] = []
    everyone: set[psutil.Process] = set()
    while True:
        launcher = programs.start("run", "train.py", "--ranks", "2", *SETTINGS, *settings)
        while victims and launcher.poll() is None:
            moment = chance.uniform(0.0, seconds)
            killed.append(strike(launcher, victims.pop(), chance, moment, programs.folder, everyone, trial % 3 == 2))
            if killed[-1].startswith("launcher"):
                break
        output, _ = launcher.communicate(timeout=180)
        if launcher.returncode == 0:
            break
        assert (launcher.returncode, killed[-1].split()[0]) == (-9, "launcher"), f"{killed}\n{output}"
    hits.update(killed)
    end = time.monotonic() + PATIENCE / 2
    while (left := living(everyone)) and time.monotonic() < end:
        time.sleep(0.1)
    assert left + programs.left() == [], killed
    assert json.dumps(results(programs, name)) == expected, killed
    assert [path.name for path in (tmp_path / "runs/train/checkpoints").iterdir() if path.name[0] == "."] == []


def strike(
    launcher: subprocess.Popen[str], kind: str, chance: random.Random, seconds: float, folder: Path,
    everyone: set[psutil.Process], in_commit: bool,
) -> str:  # fmt: skip
    """After a time, kill a process of this kind, or any if there is none yet; returns what was hit, and when."""
    checkpoints = folder / "runs/train/checkpoints"
    moment = time.monotonic() + seconds
    while launcher.poll() is None and time.monotonic() < moment:
        time.sleep(0.01)
    if in_commit:
        while launcher.poll() is None and not saving(checkpoints):
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.04))
    with suppress(psutil.Error):
        root = psutil.Process(launcher.pid)
        if not in_commit and chance.random() < 0.7:  # not the launcher again and again, which is alone at first
            while launcher.poll() is None and kind not in kinds_of(root):
                time.sleep(0.02)
            time.sleep(chance.uniform(0.0, 0.5))
        family = kinds_of(root)
        everyone.update(process for processes in family.values() for process in processes)
        chosen = kind if kind in family else chance.choice(sorted(family))
        now = "in a commit" if saving(checkpoints) else "in the steps" if "program" in family else "at the start or end"
        chance.choice(family[chosen]).kill()
        return f"{chosen} {now}"
    return "nothing: the run had ended"


def saving(checkpoints: Path) -> bool:
    with suppress(OSError):
        return any(name.startswith(".tmp-") for name in os.listdir(checkpoints))
    return False


def kinds_of(root: psutil.Process) -> dict[str, list[psutil.Process]]:
    """The processes of a run by kind; every one that a program has started counts as a worker."""
    found: dict[str, list[psutil.Process]] = {"launcher": [root]}
    kinds: dict[int, str] = {root.pid: "launcher"}
    for process in root.children(recursive=True):
        with suppress(psutil.Error):
            command, above = " ".join(process.cmdline()), kinds.get(process.ppid())
            if above in ("program", "worker"):
                kind = "worker"
            elif above == "rank":
                kind = "guard" if command.startswith("/bin/sh -c trap") else "program"
            else:
                kind = "mpirun" if "/mpirun " in command or "hydra" in command else "rank"
            kinds[process.pid] = kind
            found.setdefault(kind, []).append(process)
    return found


def living(processes: set[psutil.Process]) -> list[str]:
    """Those that are still there, whatever has started them."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found
