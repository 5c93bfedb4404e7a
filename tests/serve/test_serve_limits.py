"""`rtdetr serve` with clients that are slow, many, or gone: a deadline for heads, limits of connections and uploads."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from messages import message
from serve_cases import Detector, image_bytes, request, served

pytest.importorskip("uvicorn", reason="serve: uvicorn is not installed")
from rtdetr.serve import server

HEAD = b"POST /detect HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%s\r\n"
LONG_AGO = 5.0  # seconds after which a closed connection must have been seen


def client(url: str, data: bytes) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=LONG_AGO)
    connection.sendall(data)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes it, or has closed it, in time; what it had sent before is dropped."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def figure(url: str, name: str) -> int:
    found = re.search(rf"^{re.escape(name)} (\d+)$", request(f"{url}/metrics").body, re.MULTILINE)
    return int(found[1]) if found else 0


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_heads_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred that send half a head, or none, one that goes on and on, and one whose second head is late."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.6)
    with served(Detector()) as url, ExitStack() as stack:
        halves = [stack.enter_context(client(url, b"POST /detect HTTP/1.1\r\nHo" * (i % 2))) for i in range(100)]
        second = stack.enter_context(client(url, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
        assert second.recv(65536).startswith(b"HTTP/1.1 200")
        second.sendall(b"GET /health")
        answered = stack.enter_context(client(url, HEAD.replace(b"/detect", b"/nowhere") % (10**6, b"")))
        drip = stack.enter_context(client(url, b"GET / HTTP/1.1\r\nX: "))
        for each in (drip, answered):
            with pytest.raises(ConnectionError):
                for _ in range(60):  # until nobody reads it
                    each.sendall(b"x")
                    time.sleep(0.05)
        assert all(map(is_closed, [*halves, second]))
        assert request(f"{url}/detect", image_bytes()).status == 200


def test_a_request_in_time_may_take_longer_than_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.4)
    data = image_bytes()
    with served(Detector()) as url, client(url, HEAD % (len(data), b"") + data[:50]) as slow:
        time.sleep(0.8)
        slow.sendall(data[50:])
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")


def test_answers_that_nobody_reads_do_not_keep_the_server_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a lot waits in the server, or the rest of one page that the system has no room for."""

    class Narrow(server._Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            super().connection_made(transport)

    monkeypatch.setattr(server, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(server, "_Protocol", Narrow)
    before = set(threading.enumerate())
    with ExitStack() as stack:
        with served(Detector(), extra="//" * 10_000) as url:
            host, port = url.removeprefix("http://").split(":")

            def ask(pages: int, answered: int) -> None:
                deaf = stack.enter_context(socket.socket())
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                deaf.connect((host, int(port)))
                deaf.sendall(b"GET /tried HTTP/1.1\r\nHost: a\r\n\r\n" * pages)
                until(lambda: figure(url, 'rtdetr_requests_total{path="/tried",status="200"}') >= answered)

            ask(pages=1, answered=1)
            ask(pages=20, answered=2)
        until(lambda: set(threading.enumerate()) <= before)


def test_slow_uploads_leave_room_for_others() -> None:
    """No address has all places of files on their way, and those have none of the requests in work."""
    with served(Detector(), slots=4) as url, ExitStack() as stack:

        def slow(address: str) -> None:
            head = HEAD % (1000, b"X-Forwarded-For: %s\r\n" % address.encode())
            stack.enter_context(client(url, head + b"x"))

        def ask(address: str) -> Any:
            return request(f"{url}/detect", image_bytes(), x_forwarded_for=address)

        for number in range(4):
            slow(f"2001:db8:0:1::{number}")  # which are one customer's
        until(lambda: figure(url, "rtdetr_uploads") == 4)
        refused = ask("2001:db8:0:1:2::3")
        assert refused.status == 503 and refused.headers["Retry-After"] == "1"
        assert message("too many files", "4", "2001:db8:0:1::/64", "one address").search(refused.body["detail"])
        assert ask("2001:db8:0:2::3").status == ask("198.51.100.7").status == 200
        for number in range(4):
            slow(f"198.51.100.{number}")
        until(lambda: figure(url, "rtdetr_uploads") == 8)
        refused = ask("203.0.113.1")
        assert refused.status == 503 and message("too many files", "8").search(refused.body["detail"])
        assert figure(url, "rtdetr_requests_inside") == 8
        stack.close()
        until(lambda: figure(url, "rtdetr_uploads") == 0)
        assert ask("2001:db8:0:1::3").status == 200
        assert figure(url, 'rtdetr_requests_total{path="/detect",status="499"}') == 8
        assert figure(url, 'rtdetr_requests_total{path="/detect",status="500"}') == 0


@pytest.mark.parametrize(
    ("address", "network"),
    {
        "2001:db8:0:1:2::3": "2001:db8:0:1::/64",
        "fe80::1%eth0": "fe80::/64",
        "::ffff:198.51.100.7": "198.51.100.7",  # IPv4 at a socket of IPv6
        "198.51.100.7": "198.51.100.7",
        "no:address": "no:address",
    }.items(),
)
def test_whose_uploads_are_counted_together(address: str, network: str) -> None:
    from fastapi import Request

    from rtdetr.serve.app import network_of

    assert network_of(Request({"type": "http", "client": (address, 1)})) == network


LIMITED = """
import os, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from rtdetr.commands.serve import listener
from rtdetr.serve.server import build_server

async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"here"})

with listener("127.0.0.1", 0) as socket:
    server = build_server(app)
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    socket.listen()
    print(f"http://127.0.0.1:{socket.getsockname()[1]}", flush=True)
    sys.stdin.readline()
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        print("full", flush=True)
    sys.stdin.readline()
    for each in held:
        os.close(each)
    print("free", flush=True)
    sys.stdin.readline()
    server.should_exit = True
    thread.join(30)
"""


@pytest.fixture
def limited() -> Iterator[subprocess.Popen[str]]:
    """A server with 256 descriptors, half of which are for connections."""
    pytest.importorskip("resource", reason="limits of descriptors: not on this system")
    command = [sys.executable, "-c", LIMITED, str(Path(__file__).parents[1] / "support")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str], line: str = "") -> str:
    """The next line that it prints, after one to it."""
    assert process.stdin is not None and process.stdout is not None
    if line:
        print(line, file=process.stdin, flush=True)
    answer = process.stdout.readline().strip()
    assert answer, process.communicate()
    return answer


def test_connections_stay_below_the_limit_of_descriptors(limited: subprocess.Popen[str]) -> None:
    url = told(limited)
    with ExitStack() as stack:
        waiting = [stack.enter_context(client(url, b"")) for _ in range(300)]
        for each in waiting:
            each.settimeout(0.3 if each is waiting[0] else 0.01)
        assert 300 - sum(map(is_refused, waiting)) == 127
    until(lambda: request(f"{url}/health").status == 200)
    assert limited.communicate("\n\n\n", timeout=30)[1] == ""


def test_connections_that_cannot_be_accepted_do_not_fill_the_log(limited: subprocess.Popen[str]) -> None:
    url = told(limited)
    assert request(f"{url}/health").status == 200  # it has begun, and has all its files
    assert told(limited, "hold all descriptors") == "full"
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(client(url, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
        time.sleep(2.2)
        assert told(limited, "let them go") == "free"
        until(lambda: request(f"{url}/health").status == 200)
    errors = limited.communicate("end\n", timeout=30)[1]
    assert 1 <= errors.count("none can be accepted (Too many open files)") <= 4 and len(errors.splitlines()) <= 4, (
        errors
    )


def test_a_client_that_hangs_up_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    form = b"Content-Type: multipart/form-data; boundary=x\r\n"
    with served(Detector(), log_level="warning") as url:
        for number in range(20):
            client(url, HEAD % (1000, form * (number % 2)) + b"--x\r\n").close()
        hung_up = 'rtdetr_requests_total{path="/detect",status="%d"}'
        until(lambda: figure(url, hung_up % 499) + figure(url, hung_up % 500) == 20)
        assert figure(url, hung_up % 500) == 0
    assert capsys.readouterr().err == ""


def is_refused(connection: socket.socket) -> bool:
    try:
        return connection.recv(100).startswith(b"HTTP/1.1 503")
    except TimeoutError:
        return False
