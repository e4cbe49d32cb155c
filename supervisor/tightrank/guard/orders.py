"""guard.json: what the guard is told, checked key by key."""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from common import CONFIG, refuse


class Orders(NamedTuple):
    """guard.json."""
    daemon_argv: list[str]
    run_directory: str
    floor_bytes: int
    priority: int
    lock_descriptor: int | None
    dry_run: bool


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # of guard.json: key -> (test, what is wanted)
    "schema": (lambda v: type(v) is int and v == 1, "1 (guard and configuration of one version)"),
    "daemon_argv": (lambda v: isinstance(v, list) and v != [] and all(isinstance(a, str) for a in v), "[str, ...]"),
    "run_directory": (lambda v: isinstance(v, str) and os.path.isdir(v), "a directory that is there"),
    "floor_bytes": (lambda v: type(v) is int and 0 <= v < 2**62, "whole bytes, 0 to 2**62-1"),
    "priority": (lambda v: type(v) is int and 0 <= v <= 63, "0 to 63"),
    "lock_descriptor": (lambda v: v is None or (type(v) is int and os.path.exists(f"/proc/self/fd/{v}")),
                        "null or a descriptor that is open"),
    "dry_run": (lambda v: type(v) is bool, "true or false"),
}


def read_orders(path: str) -> Orders:
    """Raises SystemExit(78) after one line that names file, key, value and what is wanted."""
    try:
        with open(path, "rb") as file:
            values = json.load(file)
    except (OSError, ValueError) as error:
        raise refuse(f"{path}: not readable as JSON: {error}", CONFIG) from None
    if not isinstance(values, dict) or values.keys() != RULES.keys():
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise refuse(f"{path}: wanted an object with the keys {sorted(RULES)}, found {found}", CONFIG)
    for key, (good, wanted) in RULES.items():
        if not good(values[key]):
            raise refuse(f"{path}: {key} = {json.dumps(values[key])}: wanted {wanted}", CONFIG)
    return Orders(**{key: values[key] for key in Orders._fields})
