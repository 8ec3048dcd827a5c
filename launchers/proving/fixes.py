"""What to do about each piece of state that a resume can forget, by the name that a report gives it."""

from __future__ import annotations

START = "ortflow.program.start"
_SAVED = f"save it in the checkpoint, or use {START}, which saves it unasked"
_PASS = f"pass it to {START}(…, NAME=OBJECT), or save its state_dict in the checkpoint"
_HELD = f"pass an object with state_dict and load_state_dict that holds it to {START}"
_SEEDS = "derive seeds from the run's seed, the rank and the step"

FIXES: dict[str, str] = {
    "random state of Python": f"random.getstate(): {_SAVED}",
    "random state of numpy": f"numpy.random.get_state(): {_SAVED}",
    "random state of torch": f"torch.get_rng_state(): {_SAVED}",
    "random state of CUDA": f"torch.cuda.get_rng_state_all(): {_SAVED}",
    "a random generator of the program": f"pass it to {START}(…, NAME=GENERATOR), or save its state (getstate, "
    "get_state or bit_generator.state) in the checkpoint",
    "random state in the workers of the loader": "a generator in a worker process is lost with it: draw random numbers "
    "from the sample's index and the epoch, such as random.Random(f'{seed}/{epoch}/{index}')",
    "the position in the data": f"iterate with run.steps(loader) of {START}, which keeps it, or save the number of "
    "batches that were taken and skip them after a resume",
    "the epoch of the sampler": "save the epoch and call sampler.set_epoch(epoch) after a resume, before the loader is "
    "iterated; ortflow.program.Sampler needs no epoch",
    "the position in a file": "save file.tell() in the checkpoint, and call file.seek() with it after a resume",
    "the gradient scaler": _PASS,
    "the learning rate schedule": _PASS,
    "the state of the optimizer": _PASS,
    "buffers of a module, such as the statistics of BatchNorm": f"pass the module to {START}, or save its state_dict: "
    "parameters() has no buffers, and a buffer with persistent=False is in no state_dict",
    "parameters of a module": _PASS,
    "a copy of the parameters, such as an EMA": _PASS,
    "the mode of a module": "call train() or eval() in every attempt, not only in the first",
    "gradients that are accumulated over several steps": "save only after an optimizer step, or save the gradients",
    "a tensor of the program": f"save it in the checkpoint, or {_HELD}",
    "a step counter": "derive it from the step that was resumed (run.position), or save it",
    "a variable that the loop changes": f"save it in the checkpoint, or {_HELD}",
    "an object that was not restored": "its load_state_dict does not restore all that its state_dict has",
    "the order of a set": "iterate over sorted(SET): strings in a set have another order in each process "
    "(PYTHONHASHSEED)",
    "the order of a folder's files": "sort what os.listdir, glob or iterdir give",
    "the number of the attempt in the data path": f"{_SEEDS}, not from the attempt",
    "the time in the data path": f"{_SEEDS}, not from a clock",
    "the process or the machine in the data path": f"{_SEEDS}, not from a process id, a host name or an address",
    "unseeded random numbers": "seed every generator from one number, such as the variable ORTFLOW_SEED",
    "an environment variable in the data path": "pass values as arguments of the program",
    "operators that add in another order each time": "call torch.use_deterministic_algorithms(True), and use the same "
    "number of threads each time",
    "a request to stop that is not followed": "read run.should_stop once a step, then save and end",
    "steps that are missing": "count steps from the one that was resumed, to the same total in every attempt",
    "what ortflow restores": "please report it, with the run directories, which are kept: an ONNX run whose two "
    "uninterrupted runs are equal must resume bit-identically",
    "unknown": "compare the traces of the two runs, which are kept, from that step on",
}
