"""Environments for the real programs of other systems, which cannot stand in ours.

Each is made once per machine, in the folder where the test servers' programs are kept, and shared by all checkouts.
A machine without the Python that a program needs skips its tests: Pillarbox itself does not ask for that one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.servers import miss
from tools.servers.packages import cache_folder, locked


@cache
def make_environment(name: str, *requirements: str, python: tuple[int, int]) -> Path:
    """The interpreter of an environment with these packages, made now unless it is there; skips where none can be."""
    made = cache_folder() / name
    with locked(cache_folder() / f"{name}.lock"):
        if not (made / "complete").exists():
            _make(made, requirements, _find_python(name, python))
            (made / "complete").touch()
    return made / "bin" / "python"


def _make(folder: Path, requirements: tuple[str, ...], python: str) -> None:
    # A half-made one may be left of a run that was ended.
    shutil.rmtree(folder, ignore_errors=True)
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    if uv.exists():
        _run(str(uv), "venv", "-q", "--python", python, str(folder))
        _run(str(uv), "pip", "install", "-q", "--python", str(folder / "bin" / "python"), *requirements)
    else:
        _run(python, "-m", "venv", str(folder))
        _run(str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *requirements)


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        miss(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-500:]}")


def _find_python(name: str, oldest: tuple[int, int]) -> str:
    for program in _pythons(oldest):
        ask = [program, "-c", f"import sys; sys.exit(sys.version_info < {oldest})"]
        # A shim of pyenv is there for versions that it then refuses.
        if subprocess.run(ask, capture_output=True, check=False).returncode == 0:
            return program
    pytest.skip(f"{name} needs Python {oldest[0]}.{oldest[1]} or newer, which is not on this machine")


def _pythons(oldest: tuple[int, int]) -> Iterator[str]:
    yield sys.executable
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(oldest[1], oldest[1] + 4):
        found = shutil.which(f"python{oldest[0]}.{minor}")
        yield from [] if found is None else [found]
        yield from (str(path / "bin" / "python") for path in sorted(versions.glob(f"{oldest[0]}.{minor}.*")))
