"""Sections of the run file from packages: `backends.NAME` of a launcher that is installed beside ortflow.

A package registers a subclass of `LauncherOptions` as an entry point of the group `ortflow.backends`, under its
launcher's name. It is loaded if a run file has the section, and for the JSON schema and the documentation's tables.
Ranks omit these sections (`load_run_file(..., others=False)`), so they do not need the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from pydantic import Field, ValidationError, create_model

from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.backends import BUILT_IN, Backends
from ortflow.workflow.spec.launcher_options import Forms, LauncherOptions
from ortflow.workflow.spec.problem import dotted
from ortflow.workflow.spec.run import RunSpec

GROUP = "ortflow.backends"
Options = TypeVar("Options", bound=LauncherOptions)


def others() -> dict[str, EntryPoint]:
    """The sections of packages, by launcher, without the names of built-in ones."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def names_in(values: Any) -> list[str]:
    """The keys under `backends` in a run file's values that are not built in."""
    backends = values.get("backends") if isinstance(values, dict) else None
    return [str(name) for name in backends if name not in BUILT_IN] if isinstance(backends, dict) else []


def find_options(name: str) -> type[LauncherOptions] | None:
    """The section of a launcher; None if none is installed. Raises UserError if it cannot be loaded."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    point = others().get(name)
    if point is None:
        return None
    key, fix = f"backends.{name}", "repair the package that provides it"
    try:
        kind = point.load()
    except Exception as error:  # its module may raise anything
        message = f"its options cannot be loaded from {point.value} ({type(error).__name__}: {error})"
        raise UserError(message, where=key, fix=fix) from error
    if not (isinstance(kind, type) and issubclass(kind, LauncherOptions)):
        message = f"{point.value} is not a subclass of {LauncherOptions.__module__}.{LauncherOptions.__name__}"
        raise UserError(message, where=key, fix=fix)
    return kind


def spec_type(names: Iterable[str], base: type[RunSpec] = RunSpec) -> type[RunSpec]:
    """`base` with the sections of these launchers that are installed. Raises UserError.

    Returns the same class for the same sections, because runs of different classes are never equal.
    """
    package_sections = tuple(
        (name, kind) for name in sorted(names) if name not in BUILT_IN and (kind := find_options(name))
    )
    return _with_sections(base, package_sections) if package_sections else base


def forms(names: Iterable[str]) -> Forms:
    """Short forms of the sections of these launchers and the built-in ones, with paths from the top of the file."""
    all_forms = Forms()
    for name in (*BUILT_IN, *names):
        if (kind := find_options(name)) is not None:
            all_forms += kind.FORMS.under(("backends", name))
    return all_forms


def options_of(spec: RunSpec, name: str, kind: type[Options]) -> Options:
    """A launcher's options in a run; the defaults if the run file has no section for it.

    Raises Faults if the section has required keys that the run file does not set.
    """
    options = getattr(spec.backends, name, None)
    if isinstance(options, kind):
        return options
    try:
        return kind.model_validate({})
    except ValidationError as error:
        from ortflow.workflow.spec.file.wording import problems

        faults = problems(error, {}, kind)
    raise Faults(
        [UserError(fault.what, where=dotted(("backends", name, *fault.path)), fix=fault.fix) for fault in faults]
    )


@cache
def _with_sections(base: type[RunSpec], sections: tuple[tuple[str, type[LauncherOptions]], ...]) -> type[RunSpec]:
    fields: dict[str, Any] = {
        # None if a file omits it: a section with required keys has no default.
        name: (kind | None, Field(None, description=_first_line(kind)))
        for name, kind in sections
    }
    backends = create_model("Backends", __base__=Backends, __doc__=Backends.__doc__, **fields)
    backends_field: Any = (backends, backends.model_construct())
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, backends=backends_field)


def _first_line(kind: type[LauncherOptions]) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0]
