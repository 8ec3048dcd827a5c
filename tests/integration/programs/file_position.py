"""Forgets: the position in a file. Commits checkpoints by itself."""

import json
import tempfile

import ortflow.program

run = ortflow.program.context()
weight, done = 0.5, 0
if newest := run.latest():
    state = json.loads((newest / "state.json").read_text())
    weight, done = state["weight"], state["step"]
stream = tempfile.TemporaryFile()  # noqa: SIM115
stream.write(bytes(number * 37 % 251 for number in range(1000)))
stream.seek(0)
for step in range(done + 1, 41):
    sample = int.from_bytes(stream.read(4), "big") / 2**32
    loss = (weight - sample) ** 2
    weight -= 0.1 * (weight - sample)
    run.log(step=step, loss=loss)
    run.step(step)
    stop = run.should_stop
    if stop or step % 3 == 0:
        with run.commit(step) as folder:
            (folder / "state.json").write_text(json.dumps({"weight": weight, "step": step}))
    if stop:
        break
