"""Which machines an address from somewhere may lead to: by spelling, by name, by redirect, by proxy and by TLS. Nothing
here reaches a network: names and connections are made up, and a listener on the loopback sees no connection."""

from __future__ import annotations

import io
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from messages import message
from PIL import Image

from rtdetr.data.classes import DataError
from rtdetr.inference import fetch

PUBLIC = "93.184.215.14"
# Names, and what they lead to: at every look, or at the first, the second, ...
NAMES: dict[str, list[list[str]]] = {
    "public.test": [[PUBLIC]],
    "start.test": [[PUBLIC]],
    "public.test.": [[PUBLIC]],
    "under_score.test": [[PUBLIC]],
    "xn--bcher-kva.test": [[PUBLIC]],
    "six.test": [["2606:4700::1111", PUBLIC]],
    "localhost": [["::1", "127.0.0.1"]],
    "localhost.": [["127.0.0.1"]],
    "loop.test": [["127.0.0.1"]],
    "loop6.test": [["::1"]],
    "mapped.test": [["::ffff:127.0.0.1"]],
    "nat64.test": [["64:ff9b::7f00:1"]],
    "sixtofour.test": [["2002:7f00:1::1"]],
    "teredo.test": [["2001:0:7f00:1::1"]],
    "linklocal.test": [["169.254.169.254"]],
    "scoped.test": [["fe80::1%1"]],
    "private.test": [["10.0.0.7"]],
    "both.test": [[PUBLIC, "127.0.0.1"]],
    "both6.test": [["2606:4700::1111", "::1"]],
    "rebound.test": [[PUBLIC], ["127.0.0.1"]],
    "proxy.test": [["10.0.0.9"]],
}
PRIVATE = [
    *("127.0.0.1", "127.0.0.2", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255"),
    *("192.168.1.1", "169.254.169.254", "169.254.0.1", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1"),
    *("198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::ffff:10.0.0.1]"),
    *("[::127.0.0.1]", "[::7f00:1]", "[64:ff9b::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b::a9fe:a9fe]"),
    *("[64:ff9b:1::7f00:1]", "[2002:7f00:1::1]", "[2002:a00:1::]", "[2002:a9fe:a9fe::]", "[2001:0:7f00:1::1]"),
    *("[2001:0:808:808:0:0:80ff:fffe]", "[fe80::1]", "[fec0::1]", "[fc00::1]", "[fd00:ec2::254]", "[ff02::1]"),
    *("[100::1]", "[2001:db8::1]", "[3fff::1]", "[5f00::1]", "[fe80::1%25lo]", "[::1%lo]"),
    *("localhost", "LOCALHOST", "LocalHost", "localhost.", "loop.test", "loop6.test", "mapped.test", "nat64.test"),
    *("sixtofour.test", "teredo.test", "linklocal.test", "scoped.test", "private.test", "both.test", "both6.test"),
    *("127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0x7F.1", "0177.0.0.1", "017700000001"),
    *("127.0.0.01", "0127.0.0.1", "0", "0x0", "127.0.0.1.", "00000177.1", "127.0x0.0.1"),
    *("%31%32%37.0.0.1", "%31%32%37%2e0.0.1", "localhos%74", "%6c%6f%63alhost", "127.0.0%2e1", "%5B::1%5D"),
    *("１２７.0.0.1", "127.0.0.１", "①②⑦.0.0.1", "127。0。0。1", "127．0．0．1", "١٢٧.0.0.1", "ｌocalhost"),
    *("user@127.0.0.1", "public.test@127.0.0.1", "public.test:80@127.0.0.1", "public.test\\@127.0.0.1"),
    *("127.0.0.1\\.public.test", "127.0.0\n.1", "\t127.0.0.1"),
]  # fmt: skip
MALFORMED = [
    *("http://a..b/x.png", f"http://{'a' * 64}.test/x.png", "http://１２７.0.0.1/", "http://[::1/", "http://[::1]x/"),
    *("http://public.test:port/", "http://public.test:99999/", "http://public.test:-1/", "http://public.test:１/"),
    *("http://.test/", "http://a b/", "http://[zz]/", "http://[127.0.0.1]/", "http://ÿ\ud800.test/"),
    *("http://", "http:///x.png", "http://?", "http://:80/", "http://@/", "https://[v1.x]/", "http://[/"),
]  # fmt: skip


class Answering(socket.socket):
    """A connection to `peer` whose answer lies ready; nobody is at the other end."""

    peer = (PUBLIC, 80)

    def getpeername(self) -> Any:
        return self.peer

    def setsockopt(self, *_: Any) -> None:
        """It has no options of TCP."""


class Net:
    """In place of the resolver and of every connection. connected: the addresses that were asked for; answers: what
    comes back, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connected: list[tuple[str, int]] = []
        self.answers: list[bytes] = []
        self.looks: dict[str, int] = {}
        self.kept: list[socket.socket] = []
        self.resolve, self.connect = socket.getaddrinfo, socket.create_connection
        monkeypatch.setattr(socket, "getaddrinfo", self.getaddrinfo)
        monkeypatch.setattr(socket, "create_connection", self.create_connection)
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)

    def getaddrinfo(self, host: str, port: Any, *arguments: Any, **options: Any) -> Any:
        if host.lower() not in NAMES:
            return self.resolve(host, port, *arguments, **options | {"flags": socket.AI_NUMERICHOST})
        looks = NAMES[host.lower()]
        look = self.looks[host] = self.looks.get(host, 0) + 1
        found = looks[min(look, len(looks)) - 1]
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, 1, 6, "", (each, port)) for each in found]

    def create_connection(self, address: tuple[str, int], *_: Any, **__: Any) -> socket.socket:
        found = self.getaddrinfo(*address)[0][4][0]  # where the system's own look leads
        self.connected.append((found, address[1]))
        if not self.answers:
            raise ConnectionRefusedError(111, "nobody there")
        here, there = socket.socketpair()
        there.sendall(self.answers.pop(0))
        there.shutdown(socket.SHUT_WR)
        self.kept.append(there)
        connection = Answering(fileno=here.detach())
        connection.peer = (found, address[1])
        return connection


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Iterator[Net]:
    net = Net(monkeypatch)
    yield net
    for each in net.kept:
        each.close()


def answer(content: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *(f"{key}: {headers[key]}" for key in headers)]
    return "\r\n".join([*lines, "", ""]).encode() + content


def redirect(target: str) -> bytes:
    return answer(status="302 Found", Location=target.encode("utf-8").decode("latin-1"))


@pytest.mark.parametrize("host", PRIVATE)
def test_no_spelling_of_a_private_address_is_connected_to(
    host: str, net: Net, tmp_path: Path, monkeypatch: Any
) -> None:
    """Not by itself, not after a redirect, not for https, and no proxy is asked for it."""
    with pytest.raises(DataError) as refused:
        fetch.fetch(f"http://{host}:8000/x.png", tmp_path / "x", fetch.IMAGE)
    assert "\n" not in str(refused.value)
    with pytest.raises(DataError):
        fetch.fetch(f"https://{host}/x.png", tmp_path / "x", fetch.IMAGE)
    assert net.connected == []
    for scheme in ("http:", "https:", ""):
        if not set("\t\n") & set(host):  # which no head can hold
            net.answers, net.connected = [redirect(f"{scheme}//{host}/y.png")] + [answer(b"secret")] * 3, []
            with pytest.raises(DataError):
                fetch.fetch("http://start.test/x.png", tmp_path / "x", fetch.IMAGE)
            assert net.connected == [(PUBLIC, 80)]
    monkeypatch.setenv("http_proxy", "http://proxy.test:3128")
    monkeypatch.setenv("https_proxy", "http://proxy.test:3128")
    net.answers, net.connected = [answer(b"secret")] * 2, []
    for scheme in ("http", "https"):
        with pytest.raises(DataError):
            fetch.fetch(f"{scheme}://{host}/x.png", tmp_path / "x", fetch.IMAGE)
    assert net.connected == []


def test_the_table_is_long_enough() -> None:
    assert len(set(PRIVATE)) >= 60


LOCAL = ["127.0.0.1", "localhost", "%31%32%37.0.0.1", "localhos%74", "127.1", "2130706433", "0x7f.1", "１２７.0.0.1"]


@pytest.mark.parametrize("host", LOCAL)
def test_a_listener_on_the_loopback_sees_nobody(host: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listener.setblocking(False)
        with pytest.raises(DataError):
            fetch.fetch(f"http://{host}:{port}/x.png", tmp_path / "x", fetch.IMAGE._replace(seconds=1.0))
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("public.test", PUBLIC),
        ("PUBLIC.test", PUBLIC),
        ("public.test.", PUBLIC),
        ("under_score.test", PUBLIC),
        ("bücher.test", PUBLIC),
        ("xn--bcher-kva.test", PUBLIC),
        ("six.test", "2606:4700::1111"),
        ("rebound.test", PUBLIC),  # at the second look it is private: there is none
        ("8.8.8.8", "8.8.8.8"),
        ("172.32.0.1", "172.32.0.1"),
        ("[2606:4700::1111]", "2606:4700::1111"),
        ("[::ffff:8.8.8.8]", "::ffff:8.8.8.8"),
        ("[64:ff9b::808:808]", "64:ff9b::808:808"),
        ("[2002:808:808::1]", "2002:808:808::1"),
    ],
)
def test_public_addresses_are_connected_to(host: str, address: str, net: Net, tmp_path: Path) -> None:
    content = b"an image"
    for url, port in ((f"http://{host}/ä b.png?c=%20", 80), (f"http://{host}:8080/x", 8080)):
        net.answers, net.connected = [answer(content)], []
        net.looks.clear()
        fetch.fetch(url, tmp_path / "x", fetch.IMAGE)
        assert net.connected == [(address, port)] and (tmp_path / "x").read_bytes() == content
        assert max(net.looks.values(), default=1) == 1
        net.answers, net.connected = [redirect(url), answer(content)], []
        net.looks.clear()
        if host.isascii():
            fetch.fetch("http://start.test/", tmp_path / "x", fetch.IMAGE)
            assert net.connected[0] == (PUBLIC, 80) and len(net.connected) == 2


def test_the_next_address_of_a_name_is_tried(net: Net, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message("not fetched", "http://six.test/", "nobody there")):
        fetch.fetch("http://six.test/", tmp_path / "x", fetch.IMAGE)
    assert net.connected == [("2606:4700::1111", 80), (PUBLIC, 80)]


def test_a_peer_that_is_not_the_address_is_refused(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a connection come about in any other way."""
    monkeypatch.setattr(Answering, "getpeername", lambda _: ("127.0.0.1", 80))
    net.answers = [b""]
    with pytest.raises(DataError, match=message("private address")):
        fetch.fetch("http://public.test/", tmp_path / "x", fetch.IMAGE)
    net.kept[0].settimeout(5)
    assert net.kept[0].recv(100) == b""  # nothing was asked, and it is closed


def test_a_proxy_is_asked_for_public_names_alone(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.test:3128")
    net.answers = [redirect("http://loop.test/")]
    with pytest.raises(DataError, match=r"loop\.test: is on this machine"):
        fetch.fetch("http://public.test/", tmp_path / "x", fetch.IMAGE)
    assert net.connected == [("10.0.0.9", 3128)]
    with pytest.raises(DataError, match=message("unknown host", "far.invalid")):
        fetch.fetch("http://far.invalid/a.png", tmp_path / "x", fetch.IMAGE)
    assert len(net.connected) == 1
    net.answers = [answer(b"an image")]
    fetch.fetch("http://far.invalid/a.png", tmp_path / "x", fetch.IMAGE, allow_private=True)
    assert net.kept[-1].recv(1000).startswith(b"GET http://far.invalid/a.png HTTP/1.1\r\n")
    monkeypatch.setenv("no_proxy", "loop.test")  # asked directly
    with pytest.raises(DataError, match=r"loop\.test: is on this machine"):
        fetch.fetch("http://loop.test/", tmp_path / "x", fetch.IMAGE)


@pytest.mark.parametrize("url", MALFORMED)
@pytest.mark.parametrize("allow_private", [False, True])
def test_a_malformed_address_is_one_sentence(url: str, allow_private: bool, net: Net, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not an address") as refused:
        fetch.fetch(url, tmp_path / "x", fetch.IMAGE, allow_private)
    assert "\n" not in str(refused.value)
    if "\ud800" not in url and not url.startswith(("http:///", "http://?")) and url != "http://":  # the same host
        net.answers = [redirect(url)]
        with pytest.raises(DataError, match=r"http://start\.test/|not an address") as refused:
            fetch.fetch("http://start.test/", tmp_path / "x", fetch.IMAGE, allow_private)
        assert "\n" not in str(refused.value) and net.connected == [(PUBLIC, 80)]


def test_a_redirect_costs_its_head_alone(net: Net, tmp_path: Path) -> None:
    """Its body, which may be endless, is not read: this one says that it has 8 EiB."""
    head = redirect("http://public.test/x.png").replace(b"Content-Length: 0", b"Content-Length: 9223372036854775807")
    net.answers = [head, answer(b"an image")]
    fetch.fetch("http://start.test/", tmp_path / "x", fetch.IMAGE)
    assert (tmp_path / "x").read_bytes() == b"an image"


SLOW = {"silent head": b"", "slow head": b"HTTP/1.1 200 OK\r\nX-", "slow body": b"HTTP/1.1 200 OK\r\n\r\n", "tls": None}


@pytest.mark.parametrize("case", SLOW)
def test_a_fetch_that_is_given_up_closes_its_connection(case: str, tmp_path: Path) -> None:
    """The server sees the end at once, and no thread is left over."""
    before = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        url = f"{'http' if SLOW[case] is not None else 'https'}://127.0.0.1:{listener.getsockname()[1]}/"
        with pytest.raises(DataError, match=r"not here after 0\.3 s"):
            threading.Thread(target=drip, args=(listener, SLOW[case] or b"")).start()
            fetch.fetch(url, tmp_path / "x", fetch.IMAGE._replace(seconds=0.3), allow_private=True)
        deadline = time.monotonic() + 5
        while threading.active_count() > before:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def drip(listener: socket.socket, begin: bytes) -> None:
    """Sends a byte every 50 ms until the connection is closed."""
    connection, _ = listener.accept()
    with connection:
        try:
            connection.sendall(begin)
            while True:
                if begin:
                    connection.sendall(b"x")
                connection.settimeout(0.05)
                try:
                    if not connection.recv(1000):
                        return
                except TimeoutError:
                    pass
        except OSError:
            return


@pytest.mark.parametrize("case", ["too large", "404", "a page"])
def test_what_is_refused_is_closed(case: str, net: Net, tmp_path: Path) -> None:
    net.answers = {
        "too large": [b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"],
        "404": [b"HTTP/1.1 404 Not Found\r\nContent-Length: 1000000000\r\n\r\n"],
        "a page": [b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1000000000\r\n\r\n"],
    }[case]
    with pytest.raises(DataError) as refused:
        fetch.fetch("http://public.test/", tmp_path / "x", fetch.IMAGE)
    net.kept[0].settimeout(5)
    assert net.kept[0].recv(1000).startswith(b"GET / HTTP/1.1") and net.kept[0].recv(1) == b""
    assert refused.value is not None  # which is still there


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for public.test, signed by itself, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on this machine")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    subject = ["-subj", "/CN=public.test", "-addext", "subjectAltName=DNS:public.test"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "-", "-out", "-"]
    made = subprocess.run([openssl, "req", "-x509", "-days", "2", *key, *subject], capture_output=True, check=True)
    file.write_bytes(made.stdout)
    return file


@pytest.mark.parametrize("name", ["public.test", "start.test"])
def test_tls_verifies_the_name_and_not_the_address(
    name: str, certificate: Path, net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    asked: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda _, server_name, __: asked.append(server_name)
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        try:
            with context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(1000)
                secure.sendall(answer(image.getvalue()))
        except OSError:  # the client did not like the certificate
            pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        local = listener.getsockname()
        monkeypatch.setattr(socket, "create_connection", lambda address, *_, **__: net.connect(local))
        monkeypatch.setattr(socket.socket, "getpeername", lambda _: (PUBLIC, 443), raising=False)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        if name == "public.test":
            fetch.fetch(f"https://{name}/", tmp_path / "x", fetch.IMAGE)
            assert (tmp_path / "x").read_bytes() == image.getvalue()
        else:
            with pytest.raises(DataError, match=r"certificate is not valid for|Hostname mismatch|doesn't match"):
                fetch.fetch(f"https://{name}/", tmp_path / "x", fetch.IMAGE)
        thread.join(10)
    assert asked == [name]
