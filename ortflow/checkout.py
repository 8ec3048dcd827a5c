"""Whether `ortflow` and its packages, which are beside it in a checkout, come from the same checkout.

Inside a clone, Python takes `ortflow` from the current folder, and `ortflow.workflow` from the checkout that is
installed with `pip install -e`: tests of one would then pass on the code of the other. Imported first; must stay fast.
"""

from __future__ import annotations

import os

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = "workflow"


def check() -> None:
    """Raise ImportError if `ortflow.workflow` is that of another checkout or installation."""
    if os.path.isdir(os.path.join(HERE, PACKAGE)):
        return  # installed from a wheel, or copied to a login node
    from importlib.util import find_spec

    spec = find_spec(f"ortflow.{PACKAGE}")
    if spec is None or spec.origin is None:
        return
    other = os.path.dirname(os.path.dirname(os.path.abspath(spec.origin)))
    if os.path.realpath(other) not in map(os.path.realpath, (HERE, os.path.dirname(HERE))):
        raise ImportError(
            f"ortflow is imported from {os.path.dirname(HERE)}, and ortflow.{PACKAGE} from {other}: "
            "install this checkout with `pip install -e .`, or leave its folder"
        )
