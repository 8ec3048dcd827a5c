"""Whether a stranger's message carries the token of this attempt."""

from __future__ import annotations

import hmac


def is_token(given: object, token: str) -> bool:
    """Whether `given`, of an untrusted message, is `token`; the time taken says nothing about how much of it is right.

    Anything but text is not the token; nothing is raised.
    """
    # hmac takes text of ASCII characters only. JSON may hold a lone surrogate, which UTF-8 cannot encode.
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="surrogatepass"), token.encode())
