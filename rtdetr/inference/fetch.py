"""A file from the web, with limits: how large it may be, how long it may take, and whose machine it may come from."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from pathlib import Path
from typing import NamedTuple

from rtdetr import __version__
from rtdetr.data.classes import DataError

SILENCE = 10.0  # seconds without a byte after which a server counts as gone
ANY_BYTES = ("application/octet-stream", "binary/octet-stream")  # what stores say that do not know


class Limits(NamedTuple):
    what: str
    max_bytes: int
    seconds: float  # for all of it, names and redirects included
    types: tuple[str, ...]  # how its Content-Type may begin


PICTURE = Limits("picture", 100_000_000, 30.0, ("image/", *ANY_BYTES))
VIDEO = Limits("video", 2_000_000_000, 600.0, ("video/", *ANY_BYTES))


def fetch(url: str, target: Path, limits: Limits, allow_private: bool = False) -> None:
    """Writes what an http(s) address holds to the file `target`.

    Addresses of this machine and of private networks are refused, those of redirects too, unless `allow_private`.
    Raises DataError with one sentence.
    """
    outcome: Future[None] = Future()

    def work() -> None:
        try:
            _download(url, target, limits, allow_private)
            outcome.set_result(None)
        except BaseException as error:  # raised again below
            outcome.set_exception(error)

    # In a thread, because no timeout of a socket ends a server that sends its head letter by letter.
    threading.Thread(target=work, daemon=True).start()
    try:
        outcome.result(limits.seconds)
    except NotDone as error:
        raise DataError(_too_slow(url, limits)) from error


def host_of(url: str) -> str:
    """The machine that a URL names. Raises DataError."""
    try:
        host = urllib.parse.urlsplit(url).hostname
    except ValueError as error:
        raise DataError(f"{url}: not an address ({error})") from error
    if not host:
        raise DataError(f"{url}: not an address, it names no machine")
    return host


def refuse_private(url: str) -> None:
    """Raises DataError when the host of a URL is this machine or in a private network, as far as its name tells."""
    host = host_of(url)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # nobody of that name, or a proxy knows it; whoever connects will say
        return
    for *_, address in found:
        _refuse_address(str(address[0]), host)


def _refuse_address(text: str, host: str) -> None:
    address = ipaddress.ip_address(text.partition("%")[0])  # fe80::1%eth0
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_multicast or not address.is_global:
        raise DataError(
            f"{host}: is on this machine or in a private network ({address}), which is refused; "
            "allow_private=True allows it for addresses that you trust"
        )


class _Guard(urllib.request.BaseHandler):
    """Looks at every request before it is sent, those after a redirect included."""

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        refuse_private(request.full_url)
        return request

    https_request = http_request


class _Checked(http.client.HTTPConnection):
    """Looks at the machine it reached: a name may lead elsewhere when it is asked for the second time."""

    def connect(self) -> None:
        super().connect()
        _refuse_address(self.sock.getpeername()[0], self.host)


class _CheckedTls(http.client.HTTPSConnection, _Checked):
    pass


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(http.client.HTTPConnection if _by_proxy(req) else _Checked, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(http.client.HTTPSConnection if _by_proxy(req) else _CheckedTls, req)


def _by_proxy(request: urllib.request.Request) -> bool:
    return request.host != urllib.parse.urlsplit(request.full_url).netloc


def _opener(allow_private: bool) -> urllib.request.OpenerDirector:
    """Knows http and https and nothing else: no file:, no ftp:."""
    opener = urllib.request.OpenerDirector()
    common = (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    )
    free = (urllib.request.HTTPHandler(), urllib.request.HTTPSHandler())
    for handler in (*common, *(free if allow_private else (_Guard(), _Http(), _Https()))):
        opener.add_handler(handler)
    return opener


def _download(url: str, target: Path, limits: Limits, allow_private: bool) -> None:
    host_of(url)
    deadline = time.monotonic() + limits.seconds
    plain = urllib.parse.quote(url, safe="%/:=&?~#+!$,;'@()*[]")  # letters beyond ASCII, spaces
    request = urllib.request.Request(plain, headers={"User-Agent": f"rtdetr/{__version__}"})
    try:
        with _opener(allow_private).open(request, timeout=SILENCE) as response, open(target, "wb") as file:
            _check_head(response, url, limits)
            received = 0
            while chunk := response.read1(1 << 16):
                received += len(chunk)
                if received > limits.max_bytes:
                    raise DataError(_too_large(url, limits, f"{received:,} and more"))
                if time.monotonic() > deadline:
                    raise DataError(_too_slow(url, limits))
                file.write(chunk)
            if response.length:
                raise DataError(f"{url}: the answer ended {response.length:,} bytes too early; try again")
    except urllib.error.HTTPError as error:
        raise DataError(f"{url}: the server answers {error.code} ({_line(error.reason)}); check the address") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise DataError(f"{url}: cannot be fetched ({_line(reason)}); check the address and the network") from error


def _line(reason: object) -> str:
    """What a server or a library says, which may be pages, as part of a sentence."""
    return next(iter(str(reason).strip().splitlines()), "")[:200]


def _check_head(response: http.client.HTTPResponse, url: str, limits: Limits) -> None:
    kind = (response.headers.get("Content-Type") or ANY_BYTES[0]).partition(";")[0].strip().lower()
    if not kind.startswith(limits.types):
        page = ", a web page" if kind == "text/html" else ""
        raise DataError(f"{url}: the server sends {kind}{page}, expected a {limits.what} ({limits.types[0]}...)")
    if response.length is not None and response.length > limits.max_bytes:
        raise DataError(_too_large(url, limits, f"{response.length:,}"))


def _too_large(url: str, limits: Limits, size: str) -> str:
    return (
        f"{url}: {size} bytes, more than the {limits.max_bytes:,} that a {limits.what} from the web may have; download "
        "it yourself and give the file"
    )


def _too_slow(url: str, limits: Limits) -> str:
    return (
        f"{url}: not here after {limits.seconds:g} s, the time that a {limits.what} from the web may take; download it "
        "yourself and give the file"
    )
