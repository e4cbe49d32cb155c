"""What is installed where an engine's program lies, told from the names of files: nothing of it is run."""
from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePath


def environment(argv: Sequence[str], path: str) -> Path | None:
    """The Python environment of the engine's program; None: it cannot be found on `path`."""
    names = [word for word in argv if re.fullmatch(r"vllm|sglang|python[0-9.]*", PurePath(word).name)]
    program = shutil.which(names[0], path=path) if names else None
    return Path(program).absolute().parent.parent if program is not None else None


def release(argv: Sequence[str], distribution: str, path: str) -> str | None:
    """The release of the engine in the environment of the program that starts it; None: it cannot be told from here."""
    place = environment(argv, path)
    if place is None:
        return None
    found = {match.name.removesuffix(".dist-info").partition("-")[2]
             for match in place.glob(f"lib/python3*/site-packages/{distribution}-*.dist-info")}
    number = found.pop() if len(found) == 1 else ""
    return number if number and "dev" not in number else None   # a build from source carries any number
