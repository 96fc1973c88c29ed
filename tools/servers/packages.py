"""Where the servers' programs come from.

Debian packages are installed by apt-get or, from another release, unpacked into a cache folder. What Maven fetches
goes there, too.
"""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from .errors import ServerError

INSTALL = Path(__file__).parent.parent / "install-packages"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SUDO = [] if os.geteuid() == 0 else ["sudo"]


def install(*packages: str) -> None:
    """Install packages on this machine, as root or through sudo."""
    with apt():
        print(f"Installing Debian packages: {' '.join(packages)}", flush=True)
        _run([*SUDO, str(INSTALL), *packages], f"apt-get could not install {' '.join(packages)}")


def unpack(*packages: str, release: str) -> Path:
    """Unpack packages of another Debian release, with all they depend on, and return the folder.

    Nothing is installed: the folder is a tree with its own C library, shared by all checkouts here.
    """
    cache = cache_folder()
    tree = cache / f"{packages[0]}-{release}"
    with locked(cache / "lock"):
        if tree.exists():
            return tree
        print(f"Downloading from Debian {release}: {' '.join(packages)}", flush=True)
        work = cache / "work"
        shutil.rmtree(work, ignore_errors=True)
        archives = _download(packages, release=release, work=work)
        for archive in archives:
            extract = ["dpkg-deb", "-x", str(archive), str(work / "tree")]
            _run(extract, f"{archive.name} could not be unpacked")
        (work / "tree").rename(tree)
        shutil.rmtree(work)
    return tree


def jar_folder(name: str, version: str) -> Path:
    """Return the folder, shared by all checkouts here, where `fetch_jars` puts them."""
    return cache_folder() / f"{name}-{version}"


def fetch_jars(pom: Path, name: str, version: str) -> None:
    """Have Maven fetch one version of what a pom asks for, unless it is there."""
    cache = cache_folder()
    with locked(cache / "lock"):
        if jar_folder(name, version).exists():
            return
        if shutil.which("mvn") is None:
            install("maven")
        print(f"Downloading from Maven Central: {name} {version}", flush=True)
        work = cache / "work"
        shutil.rmtree(work, ignore_errors=True)
        copy = ["mvn", "-q", "-B", "-f", str(pom), f"-D{name}={version}", f"-DoutputDirectory={work}"]
        _run([*copy, "dependency:copy-dependencies"], f"Maven could not fetch {name} {version}")
        work.rename(jar_folder(name, version))


def _download(packages: tuple[str, ...], *, release: str, work: Path) -> list[Path]:
    # A private apt with its own sources and lists. It knows no installed package, so it fetches all it needs.
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    (work / "status").touch()
    (work / "sources.list").write_text(f"deb [signed-by={KEYRING}] {_mirror()} {release} main\n")
    options = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "-",
        "Dir::Etc::Preferences": "-",
        "Dir::Etc::PreferencesParts": "-",
        "Dir::State": work,
        "Dir::State::Status": work / "status",
        "Dir::Cache": work / "cache",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "root",
    }
    command = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items())]
    with apt():
        _run([*command, "update"], f"The package lists of Debian {release} could not be read")
    _run(
        [*command, "install", "-y", "--download-only", "--no-install-recommends", *packages],
        f"{' '.join(packages)} could not be downloaded from Debian {release}",
    )
    return sorted((work / "cache/archives").glob("*.deb"))


def _mirror() -> str:
    """Return the address of the Debian mirror that apt uses on this machine."""
    with apt():
        if not _targets():
            _run([*SUDO, "apt-get", "-qq", "update"], "apt-get update failed")
    for origin, release, address in _targets():
        if origin == "Debian" and "-" not in release:
            return address
    raise ServerError("Expected a Debian mirror in apt's sources; `apt-get indextargets` lists none.")


def _targets() -> list[list[str]]:
    listing = [
        "apt-get",
        "indextargets",
        "--format",
        "$(ORIGIN)|$(RELEASE)|$(REPO_URI)",
        "Created-By: Packages",
    ]
    output = subprocess.run(listing, capture_output=True, text=True, check=False).stdout
    return [line.split("|") for line in output.splitlines()]


def cache_folder() -> Path:
    """Return the folder, shared by all checkouts here, for programs that are not installed."""
    if os.geteuid() == 0:
        folder = Path("/var/cache/pillarbox-services")
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pillarbox-services"
    return folder


def apt() -> AbstractContextManager[None]:
    """Be alone with apt: where an update empties its cache, as in containers, others lose what they were installing."""
    return locked(cache_folder() / "apt")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be alone with a lock file, among the processes of this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str], failure: str) -> None:
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ServerError(f"{failure}.\n{(result.stderr or result.stdout).strip()}")
