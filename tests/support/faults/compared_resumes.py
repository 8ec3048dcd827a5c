"""Ranks bring what they hold after a resume into the form of a checkpoint again, and compare it with the files."""

from __future__ import annotations


def compare_resumes() -> None:
    """From now on, each resume in this process is compared, and leaves an event `compared`."""
    import numpy as np

    from ortflow.workflow.checkpoint.load import Window, load
    from ortflow.workflow.device.cpu import HostBuffer
    from ortflow.workflow.device.shard import Shard
    from ortflow.workflow.steps.checkpoint import Saver

    resume = Saver.resume

    def resumed(self: Saver) -> None:
        resume(self)
        if not self._saved_step:
            return
        trainer = self._context.trainer
        trainer.before_save()
        buffers = trainer.state()
        windows, held = {}, {}
        for name, buffer in buffers.items():
            part, start = (buffer.part, buffer.start) if isinstance(buffer, Shard) else (buffer, 0)
            held[name] = part.read()
            windows[name] = Window(HostBuffer(np.empty(part.count, part.dtype)), start, buffer.count)
        saved = load(self._store, self._saved_step, windows, index=trainer.index).buffers
        for name in buffers:
            same = np.array_equal(held[name].view(np.uint8), saved[name].view(np.uint8))
            assert same, f"{name} is not what the checkpoint contains"
        self._context.events.write("compared", step=self._saved_step, buffers=sorted(buffers))

    Saver.resume = resumed  # type: ignore[method-assign]
