"""Trains third-party models under ORTModule on the CPU, against PyTorch, and prints a row for each.

    python tests/torch/survey/ortmodule.py [--only 'timm/*'] [--part 2/13] [--most 3]

A model is `right` if its losses of 20 steps are as near to PyTorch's as rounding allows, `refused` if a sentence says
why there is no graph. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "support")]

STEPS = 20
TOLERANCE = 1e-3
"""Of the losses, relative to those above 1. A first step that differs by more than rounding is refused by ORTModule."""

FACTOR = 3.0
"""Of how far PyTorch's own curve moves if parameters begin off by their last bit."""


def row(name: str) -> dict[str, Any]:
    """The row of a model."""
    import torch
    from catalogue import case_of
    from worker import shake, without_dropout

    from ortflow.torch import ORTModule
    from ortflow.workflow.errors import UserError

    case = case_of(name)
    curves = []
    try:
        shaken = [lambda module, seed=seed: shake(module, seed) for seed in (1, 2, 3)]
        for wrap in (lambda module: module, ORTModule, *shaken):
            module = wrap(without_dropout(case.module()))
            optimizer = torch.optim.SGD(module.parameters(), 1e-3)
            losses = []
            for batch in case.batches(STEPS):
                optimizer.zero_grad()
                loss = case.torch_loss(module, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            curves.append(losses)
    except UserError as error:
        return {"case": name, "result": "refused", "why": str(error)[:300]}
    off, *alone = (
        max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(curve, curves[0], strict=True)) for curve in curves[1:]
    )
    right = off <= max(TOLERANCE, FACTOR * max(alone))
    return {"case": name, "result": "right" if right else "wrong", "off": off, "pytorch": max(alone)}


def main() -> int:
    """Run the models; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--most", type=int)
    options = parser.parse_args()
    import torch
    from catalogue import names
    from rotation import places

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = [name for name in names() if fnmatch(name, options.only)]
    chosen = [chosen[place] for place in places(len(chosen), options.part)]
    if options.most:
        chosen = chosen[:: max(1, len(chosen) // options.most)][: options.most]
    wrong = 0
    for name in chosen:
        try:
            found = row(name)
        except Exception as error:  # noqa: BLE001 - the others still run
            found = {"case": name, "result": "wrong", "why": f"{type(error).__name__}: {str(error)[:300]}"}
        wrong += found["result"] == "wrong"
        print(json.dumps(found), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
