"""Downloads with limits: the size, the time, and the hosts that may be contacted."""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import suppress
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple

from rtdetr import __version__
from rtdetr.data.classes import DataError

SILENCE = 10.0  # seconds without a byte before a download fails
ANY_BYTES = ("application/octet-stream", "binary/octet-stream")  # sent by stores that do not know the type
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # its last 32 bits are an IPv4 address
UNICAST = ipaddress.IPv6Network("2000::/3")  # contains every public IPv6 address
NOT_PUBLIC = ("192.0.0.0/24", "3fff::/20")  # some versions of Python count them as global


class Limits(NamedTuple):
    what: str  # a noun with its article, for messages
    max_bytes: int
    seconds: float  # for the whole download, including name resolution and redirects
    types: tuple[str, ...]  # allowed prefixes of Content-Type


IMAGE = Limits("an image", 100_000_000, 30.0, ("image/", *ANY_BYTES))
VIDEO = Limits("a video", 2_000_000_000, 600.0, ("video/", *ANY_BYTES))


def fetch(url: str, target: Path, limits: Limits, allow_private: bool = False) -> None:
    """Downloads an http(s) URL to the file `target`.

    Refuses addresses of this machine and of private networks, also after redirects, unless `allow_private`.
    Raises DataError with one sentence.
    """
    outcome: Future[None] = Future()
    web = _Web(public=not allow_private)

    def work() -> None:
        try:
            _download(url, target, limits, web)
            outcome.set_result(None)
        except BaseException as error:  # raised again below
            outcome.set_exception(error)

    # In a thread, because a socket timeout does not stop a server that sends its headers byte by byte.
    threading.Thread(target=work, daemon=True).start()
    try:
        outcome.result(limits.seconds)
    except NotDone as error:
        raise DataError(
            f"{url}: not here after {limits.seconds:g} s, the time that {limits.what} from the web may take; download "
            "it yourself and give the file"
        ) from error
    finally:
        web.stop()


def host_of(url: str) -> str:
    """Returns the host of a URL in ASCII. Raises DataError, also for spellings that programs read differently: 127.1,
    0x7f.0.0.1, %31, digits of other scripts."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname or "", parts.port  # port may raise ValueError, too
        if host:
            return _plain_host(host, parts)
    except ValueError as error:  # includes UnicodeError
        raise DataError(f"{url}: not an address ({_line(error)})") from error
    raise DataError(f"{url}: not an address, it names no machine")


def _plain_host(host: str, parts: urllib.parse.SplitResult) -> str:
    """Returns the host in canonical form. Raises ValueError."""
    if parts.scheme in ("http", "https") and "@" in parts.netloc:
        raise ValueError("a user or password before the host is not sent; leave it out")
    if "[" in parts.netloc:
        if "%" in host or not re.fullmatch(r"(.*@)?\[[^]]*\](:[0-9]*)?", parts.netloc):
            raise ValueError("expected an IPv6 address in brackets, without %")
        return str(ipaddress.IPv6Address(host))
    name = host.encode("idna").decode()
    if not re.fullmatch(r"[a-z0-9._-]+", name) or any(each.isdigit() and not each.isascii() for each in host):
        raise ValueError(f"its host {host!r} is neither a name nor four decimal numbers")
    if re.fullmatch(r"(.*\.)?([0-9]+|0x[0-9a-f]*)\.?", name):  # many programs read such names as numbers
        return str(ipaddress.IPv4Address(host))
    return name


def public_addresses(host: str) -> list[str]:
    """Returns the distinct addresses of a host. Raises DataError if one of them is on this machine or in a private
    network, and OSError if the name is unknown."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    for each in addresses:
        _refuse_private(each, host)
    return addresses


def _refuse_private(text: str, host: str) -> None:
    address = ipaddress.ip_address(text.partition("%")[0])  # fe80::1%eth0
    if not _is_public(address):
        raise DataError(
            f"{host}: is on this machine or in a private network ({address}), which is refused; "
            "allow_private=True allows it for addresses that you trust"
        )


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if any(address in ipaddress.ip_network(each) for each in NOT_PUBLIC) or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global
    inner = address.ipv4_mapped or address.sixtofour
    if address in NAT64:
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return _is_public(inner) if inner is not None else address in UNICAST and address.is_global


class _Web(urllib.request.AbstractHTTPHandler):
    """Handles http and https. Checks every request before it is sent, also after a redirect, and the address that it
    connects to. Another thread may stop it, which closes its sockets: this one may be waiting for a byte."""

    def __init__(self, public: bool) -> None:
        super().__init__()
        self.public, self.stopped = public, False
        self.lock, self.sockets = threading.Lock(), list[socket.socket]()

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for each in self.sockets:
                with suppress(OSError):  # closed by the server already
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        host_of(request.full_url)
        return self.do_request_(request)

    https_request = http_request

    def _open(self, kind: Callable[..., Any], request: urllib.request.Request) -> http.client.HTTPResponse:
        by_proxy = request.has_proxy() or request._tunnel_host is not None  # type: ignore[attr-defined]
        if by_proxy and self.public:
            self._check_before_proxy(host_of(request.full_url))

        def connection(*arguments: Any, **options: Any) -> http.client.HTTPConnection:
            made = kind(*arguments, **options)  # its host remains the name, for which TLS verifies the certificate
            made._create_connection = partial(self._connected, self.public and not by_proxy)  # a proxy may be private
            return made

        return self.do_open(connection, request)

    http_open = partialmethod(_open, http.client.HTTPConnection)
    https_open = partialmethod(_open, http.client.HTTPSConnection)

    def _connected(self, public: bool, address: tuple[str, int], *options: Any) -> socket.socket:
        """Resolves a host once and connects to one of its addresses; if `public`, to none that is private. Raises
        OSError after `stop`."""
        host, port = address
        problem = OSError(f"{host} has no address")
        for each in public_addresses(host) if public else [host]:
            try:
                connected = socket.create_connection((each, port), *options)
            except OSError as error:
                problem = error
                continue
            with self.lock:
                if self.stopped:
                    connected.close()
                    raise OSError("given up")
                self.sockets.append(connected.dup())  # TLS takes over the socket itself
            if public:
                _refuse_private(connected.getpeername()[0], host)
            return connected
        raise problem

    def _check_before_proxy(self, host: str) -> None:
        """Raises DataError for a private or unknown host: the proxy resolves the name again and may know others."""
        try:
            public_addresses(host)
        except OSError as error:
            raise DataError(
                f"{host}: this machine cannot resolve the name, so it may be private to the network of the proxy; "
                "allow_private=True leaves that to the proxy"
            ) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Reads only the headers of a redirect: its body may be endless."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        fp.close()
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _download(url: str, target: Path, limits: Limits, web: _Web) -> None:
    opener = urllib.request.OpenerDirector()  # for http and https only: no file:, no ftp:
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
        web,
    ):
        opener.add_handler(handler)
    request = urllib.request.Request(_plain(url), headers={"User-Agent": f"rtdetr/{__version__}"})
    try:
        with opener.open(request, timeout=SILENCE) as response, open(target, "wb") as file:
            _check_head(response, url, limits)
            received = 0
            while chunk := response.read1(1 << 16):
                received += len(chunk)
                if received > limits.max_bytes:
                    raise DataError(_too_large(url, limits, f"{received:,} and more"))
                file.write(chunk)
            if response.length:
                raise DataError(f"{url}: the answer ended {response.length:,} bytes too early; try again")
    except DataError:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"{url}: the server answers {error.code} ({_line(error.reason)}); check the address") from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: an invalid URL from a server
        reason = getattr(error, "reason", error)
        raise DataError(f"{url}: cannot be fetched ({_line(reason)}); check the address and the network") from error


def _plain(url: str) -> str:
    """Returns a URL as it is sent: host in ASCII, spaces and non-ASCII characters escaped. Raises DataError."""
    host, parts = host_of(url), urllib.parse.urlsplit(url)
    place = f"[{host}]" if ":" in host else host
    place += f":{parts.port}" if parts.port is not None else ""
    return urllib.parse.quote(parts._replace(netloc=place).geturl(), safe="%/:=&?~#+!$,;'@()*[]")


def _line(reason: object) -> str:
    """Returns the first line of an error, which may be pages long, for use in a sentence."""
    return next(iter(str(reason).strip().splitlines()), "")[:200]


def _check_head(response: http.client.HTTPResponse, url: str, limits: Limits) -> None:
    kind = (response.headers.get("Content-Type") or ANY_BYTES[0]).partition(";")[0].strip().lower()
    if not kind.startswith(limits.types):
        page = ", a web page" if kind == "text/html" else ""
        raise DataError(f"{url}: the server sends {kind}{page}, expected {limits.what} ({limits.types[0]}...)")
    if response.length is not None and response.length > limits.max_bytes:
        raise DataError(_too_large(url, limits, f"{response.length:,}"))


def _too_large(url: str, limits: Limits, size: str) -> str:
    return (
        f"{url}: {size} bytes, more than the {limits.max_bytes:,} that {limits.what} from the web may have; download "
        "it yourself and give the file"
    )
