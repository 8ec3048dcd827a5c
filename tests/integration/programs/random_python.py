"""Forgets: random state of Python. Commits checkpoints by itself."""

import json
import random

import ortflow.program

random.seed(3)
run = ortflow.program.context()
weight, done = 0.5, 0
if newest := run.latest():
    state = json.loads((newest / "state.json").read_text())
    weight, done = state["weight"], state["step"]
for step in range(done + 1, 41):
    noise = random.gauss(0.0, 0.1)
    loss = (weight - 1.0 + noise) ** 2
    weight -= 0.1 * (weight - 1.0 + noise)
    run.log(step=step, loss=loss)
    run.step(step)
    stop = run.should_stop
    if stop or step % 3 == 0:
        with run.commit(step) as folder:
            (folder / "state.json").write_text(json.dumps({"weight": weight, "step": step}))
    if stop:
        break
