"""Secrets in files: one line each, never shown."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tightrank.errors import ConfigError


def read_secret(path: str, refuse: Callable[[str], ConfigError]) -> str:
    """The one line in the file. `refuse` makes the error of a sentence; it names the key. Raises ConfigError."""
    try:
        secret = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise refuse(f"{path} cannot be read ({reason}); make it readable or leave the key out") from None
    if not secret or len(secret.splitlines()) > 1:
        raise refuse(f"{path} must hold exactly one line, the secret")
    return sendable(path, secret, refuse)


def sendable(place: str, secret: str, refuse: Callable[[str], ConfigError]) -> str:
    """`secret`, when an HTTP header can carry it. Raises ConfigError, which does not show it."""
    if not (secret.isascii() and secret.isprintable()):
        raise refuse(f"{place} has a secret with characters that no HTTP header carries; use printable ASCII")
    return secret
