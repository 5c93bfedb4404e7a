from __future__ import annotations

from collections.abc import Iterator

import pytest
from weight_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.http.shutdown()
    running.http.server_close()
