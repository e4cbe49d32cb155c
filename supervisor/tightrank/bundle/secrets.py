"""Which texts of a deployment are secret, and how they are taken out of another text."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tightrank.config import Config, flags
from tightrank.config.flags import MASK
from tightrank.plan import is_secret

_KEY_CHARACTERS = 4          # of a key that somebody gave as one; a shorter one would mask half of what there is to read
_ENV_CHARACTERS = 6          # of a variable whose name sounds like one
_NO_SECRETS = ("enabled", "disabled", "default", "required")


def known(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    """Keys and tokens: of files, of the engines' command lines, of variables whose names sound like it."""
    paths = [config.http.token_file, config.gateway.engine_key_file, *(worker.api_key_file for worker in config.workers)]
    yield from (text for path in paths if path and len(text := _read(path)) >= _KEY_CHARACTERS)
    for args in (config.command, *(worker.args for worker in config.workers)):
        yield from (text for text in flags.secret_values(args) if len(text) >= _KEY_CHARACTERS)
    for variables in (environment, *(worker.env for worker in config.workers)):
        yield from (text for name, text in variables.items() if is_secret(name) and _may_be_secret(text))
        yield from (found for text in variables.values() for found in flags.passwords(text))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""                          # what we cannot read is in nothing that we write


def _may_be_secret(text: str) -> bool:
    """TOKENIZERS_PARALLELISM=false and MAX_TOKENS=131072 have names of secrets too."""
    return len(text) >= _ENV_CHARACTERS and not text.isdecimal() and text.lower() not in _NO_SECRETS


def scrubber(secrets: Iterable[str]) -> Callable[[str], str]:
    """Takes `secrets` out of a text, as they are and as JSON writes them."""
    forms = {form for secret in secrets for form in (secret, json.dumps(secret)[1:-1])}
    ordered = sorted(forms, key=len, reverse=True)         # of two that begin alike the longer one first

    def scrub(text: str) -> str:
        for form in ordered:
            text = text.replace(form, MASK)
        return text

    return scrub
