"""A Redis Cluster of three masters, handled as one server. Its url is that of the first."""

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .broker import CERTIFICATES
from .errors import ServerError
from .redis import RedisServer
from .server import START_SECONDS

SIZE = 3


class RedisNode(RedisServer):
    other_ports = ("bus",)

    def __init__(self, home: Path, *, number: int) -> None:
        self.name = f"node-{number}"
        super().__init__(home)
        self.certificates = home.parent / CERTIFICATES

    def more_settings(self) -> str:
        return f"cluster-enabled yes\ncluster-port {self.port_for('bus')}\ncluster-node-timeout 5000\n"

    def is_joined(self) -> bool:
        """Return whether this node knows all the others and finds that every slot is served."""
        result = subprocess.run(self.client("cluster", "info"), capture_output=True, text=True, check=False)
        return {"cluster_state:ok", f"cluster_size:{SIZE}"} <= set(result.stdout.split())


class RedisClusterServer(RedisServer):
    name = "redis-cluster"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.nodes = [RedisNode(self.folder, number=number) for number in range(1, SIZE + 1)]

    @property
    def port(self) -> int:
        return self.nodes[0].port

    def urls(self) -> dict[str, str]:
        return {self.name: self.url}

    def pid(self) -> int | None:
        """Return the id of the first node, or None when one of them does not run."""
        return self.nodes[0].pid() if all(node.pid() for node in self.nodes) else None

    def answers(self) -> bool:
        return all(node.answers() and node.is_joined() for node in self.nodes)

    def start(self) -> None:
        self.install()
        self.make_folder(self.folder)
        self._each(RedisNode.start)
        if not self._ready_file.exists():
            addresses = [f"127.0.0.1:{node.port}" for node in self.nodes]
            self.run(*self.nodes[0].client("--cluster", "create", *addresses, "--cluster-yes"))
            self._ready_file.touch()
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if time.monotonic() > deadline:
                raise ServerError(f"its nodes did not find each other within {START_SECONDS} s; see {self.folder}.")
            time.sleep(0.1)

    def stop(self) -> None:
        self._each(RedisNode.stop)

    def kill(self) -> None:
        self._each(RedisNode.kill)

    def pause(self) -> None:
        self._each(RedisNode.pause)

    def resume(self) -> None:
        self._each(RedisNode.resume)

    def _each(self, action: Callable[[RedisNode], None]) -> None:
        with ThreadPoolExecutor(SIZE) as pool:
            list(pool.map(action, self.nodes))
