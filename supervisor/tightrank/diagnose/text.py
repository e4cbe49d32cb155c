"""What is shown of an engine's output: without colours and secrets, and not without end."""
from __future__ import annotations

import re

EVIDENCE_CHARACTERS = 600
MESSAGE_CHARACTERS = 4096

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")      # a log may hold what makes a terminal act
_NAME = r"(?:api[_-]?key|[_-]token|secret|password)(?![a-z])"
_VALUE = r"""(?:\[[^\]]*\]?|[^\s,'")\]]+)"""      # a word, or a list of them
_SECRET = re.compile(rf"""(?i)(--?[\w-]*{_NAME}\s+|{_NAME}['"]?\s*[=:]\s*['"]?|\bbearer\s+){_VALUE}""")
# What is a secret whatever stands before it: the user of a URL, a token of the model hub.
_IN_ITSELF = re.compile(r"(?<=://)[^/@\s:]{1,200}:[^/@\s]{1,200}(?=@)|\bhf_[A-Za-z0-9]{20,200}\b")
_UNKNOWN_ARGUMENTS = re.compile(r"(?<=unrecognized arguments: ).*")


def without_secrets(text: str) -> str:
    """A line of output to show: what follows a name like `api_key` or `--hf-token` is masked (SGLang prints them)."""
    return _IN_ITSELF.sub("***", _SECRET.sub(r"\1***", text))


def plain(text: str) -> str:
    """One line without colours, cut to what a message may have."""
    cut = text[:MESSAGE_CHARACTERS]
    return (_ANSI.sub("", cut) if "\x1b" in cut else cut).rstrip()


def clean(text: str) -> str:
    """For people, without secrets: of arguments that the engine does not know only the names are kept."""
    shown = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", without_secrets(plain(text)))
    return _UNKNOWN_ARGUMENTS.sub(lambda match: _names(match[0]), shown)[:EVIDENCE_CHARACTERS]


def _names(arguments: str) -> str:
    return " ".join(word.partition("=")[0] if word.startswith("-") else "***" for word in arguments.split())
