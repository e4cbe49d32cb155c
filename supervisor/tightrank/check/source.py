"""Python sources of an engine, read and never run."""
from __future__ import annotations

import ast
from pathlib import Path


def parse(path: Path) -> ast.Module:
    """An empty module for a file that this Python cannot read. Raises OSError."""
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])
