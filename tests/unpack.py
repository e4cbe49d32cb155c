"""A bundle as {name: text}; what an archive of ours must be is asserted on the way."""
from __future__ import annotations

import tarfile
from pathlib import Path


def unpack(path: Path) -> dict[str, str]:
    """Names without the folder at the top, which is called as the archive."""
    assert path.stat().st_mode & 0o777 == 0o600
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            assert member.isfile() and member.mode == 0o600
            top, _, name = member.name.partition("/")
            assert top == path.name.removesuffix(".tar.gz") and ".." not in name and not name.startswith("/")
            file = archive.extractfile(member)
            assert file is not None
            found[name] = file.read().decode()
    return found
