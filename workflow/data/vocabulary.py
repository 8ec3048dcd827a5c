"""What masking needs to know of a tokenizer, put into the `mask_tokens` of a set that states less."""

from __future__ import annotations

from typing import Any

from ortflow.workflow.data.tokenised import count_of, tokenizer_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.transforms import MaskTokens, Transform

_MASKS = ("[MASK]", "<mask>")


def transforms_of(section: DataSet, key_path: str) -> list[Transform]:
    """The transforms of a set, with complete `mask_tokens`.

    Raises UserError, at the key, for what neither the run file nor the tokenizer has.
    """
    transforms = list(section.transforms)
    for number, transform in enumerate(transforms):
        if transform.mask_tokens is not None:
            place = f"{key_path}.transforms[{number}].mask_tokens"
            completed = _completed(transform.mask_tokens, section, place)
            transforms[number] = transform.model_copy(update={"mask_tokens": completed})
    return transforms


def has_mask(path: str) -> bool:
    """Whether a tokenizer has a token that masks. Raises UserError if it cannot be read."""
    return _mask(tokenizer_of(path)) is not None


def _mask(tokenizer: Any) -> str | None:
    return next((name for name in _MASKS if tokenizer.token_to_id(name) is not None), None)


def _completed(mask: MaskTokens, section: DataSet, key_path: str) -> MaskTokens:
    if section.text is None or None not in (mask.mask_id, mask.vocabulary, mask.special):
        return mask
    tokenizer = tokenizer_of(section.text.tokenizer)
    mask_token = _mask(tokenizer)
    if mask.mask_id is None and mask_token is None:
        message = f"{section.text.tokenizer} has none of the tokens {', '.join(_MASKS)}"
        raise UserError(message, where=f"{key_path}.mask_id", fix="add the number of the token that masks")
    special = sorted(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    values = {
        "mask_id": mask_token and tokenizer.token_to_id(mask_token),
        "vocabulary": count_of(tokenizer),
        "special": special,
    }
    return mask.model_copy(update={key: value for key, value in values.items() if getattr(mask, key) is None})
