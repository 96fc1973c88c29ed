"""What all tests with processes share."""

from collections.abc import Iterator

import pytest

from tests.acceptance.launcher import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    started = Launcher()
    yield started
    started.close()
