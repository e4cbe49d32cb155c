"""Makes tightrank's own environment in an image: `python3 environment.py DIRECTORY [EXTRA ...]`.

What it needs is read from pyproject.toml, the exact releases from supervisor.txt, both beside this file. The code itself
is laid into DIRECTORY/supervisor by the Dockerfile, as in a checkout, so that it finds DIRECTORY/adapter/inject.
"""
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMAND = """#!/bin/sh
exec /opt/tightrank/bin/python -P -c 'import sys; from tightrank.cli import main; sys.exit(main())' "$@"
"""


def needs(extras):
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]


def main(directory, *extras):
    path, pip = Path(directory), HERE / "pip"
    venv.create(pip, with_pip=True)          # apart, so that no pip is left in the image
    venv.create(path, symlinks=True)
    install = [pip / "bin" / "python", "-m", "pip", "--python", path / "bin" / "python", "install", "--quiet", "--no-input"]
    subprocess.run([*install, "--constraint", HERE / "supervisor.txt", *needs(extras)], check=True)
    packages, = path.glob("lib/python3*/site-packages")
    (packages / "tightrank.pth").write_text(f"{path / 'supervisor'}\n")
    command = path / "bin" / "tightrank"
    command.write_text(COMMAND)
    command.chmod(0o755)


if __name__ == "__main__":
    main(*sys.argv[1:])
