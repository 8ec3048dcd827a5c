"""Every model of the survey by name."""

from __future__ import annotations

import handwritten
import language_families
import language_models
import vision_models
from case import Case


def names() -> list[str]:
    """`library/family`, in the table's order; of transformers `transformers/head/family`."""
    return [
        *vision_models.names(),
        *(f"transformers/{head}/{family}" for head, found in language_families.FAMILIES.items() for family in found),
        *handwritten.names(),
    ]


def case_of(name: str) -> Case:
    """The case of a name. Raises KeyError."""
    library, _, family = name.partition("/")
    if library == "transformers":
        head, _, family = family.partition("/")
        return language_models.case(family, head, language_families.FAMILIES[head][family])
    if library == "handwritten":
        return handwritten.case(family)
    return vision_models.case(library, family)
