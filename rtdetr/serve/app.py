"""The web application: takes an image, returns its detections as JSON; with metrics and a page, all from this host."""

from __future__ import annotations

import difflib
import ipaddress
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from PIL import Image
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import rtdetr
from rtdetr.data.classes import DataError
from rtdetr.inference.results import as_json
from rtdetr.serve.batching import Answer, Batcher, Detect
from rtdetr.serve.figures import Figures
from rtdetr.serve.uploads import Upload

HERE = Path(__file__).parent
# The pages cannot contact another host, whatever the name of a file or a class contains.
OWN_ONLY = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src 'self' blob: data:; media-src blob:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; form-action 'none'; frame-ancestors 'none'"
}
BINARY = {"schema": {"type": "string", "format": "binary"}}
FORM = {"schema": {"type": "object", "properties": {"file": BINARY["schema"]}, "required": ["file"]}}
TAKES = {"requestBody": {"required": True, "content": {"image/*": BINARY, "multipart/form-data": FORM}}}
THRESHOLDS = Query([], description="X of all classes, CLASS=X of one; may be repeated")
REFUSALS = {
    400: "the request brings no image",
    408: "the file did not arrive in time",
    413: "the file, or the image in it, is too large",
    415: "the file is no image that can be read",
    422: "a threshold is not a number from 0 to 1 or names an unknown class; or the parameter is unknown",
    500: "detection failed; the server's log says why",
    503: "too many requests, or files on their way, at once; Retry-After says in how many seconds to try again",
}


HUNG_UP = 499  # nginx's status for a client that closed the connection; counted only, never sent


class Settings(NamedTuple):
    """The limits of a server. slots: requests in progress, each of which keeps one file in memory at most. Twice as
    many uploads may be in progress, from one address as many as there are slots."""

    model: str  # its name in /health
    class_names: tuple[str, ...]
    threshold: float = 0.5  # if a request sets none
    max_batch: int = 8
    slots: int = 64
    max_megabytes: float = 20.0
    max_megapixels: float = 50.0
    thresholds: Mapping[int, float] = MappingProxyType({})  # by category id; empty: `threshold` for all


class Detected(BaseModel):
    category_id: int
    name: str
    score: float
    box: tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels of the upright image


class DetectedImage(BaseModel):
    """Size of the upright image in pixels, and its detections, best first."""

    width: int
    height: int
    detections: list[Detected]


class Refusal(BaseModel):
    detail: str


class Measured:
    """Counts every response of an application by path and status."""

    def __init__(self, app: ASGIApp, figures: Figures) -> None:
        self.app, self.figures = app, figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            path = scope["path"] if scope.get("endpoint") else "other"  # the number of paths is unlimited
            self.figures.request(path, status, time.perf_counter() - began)


class RequestHandler:
    """Admits as many requests as there are slots, and answers them. figures: receives the metrics."""

    def __init__(self, detect: Detect, settings: Settings, figures: Figures) -> None:
        self.settings = settings
        self.batcher = Batcher(detect, settings.max_batch, settings.max_megapixels, figures.batches.add)
        self.working = 0  # requests whose file has arrived
        self.arriving: Counter[str] = Counter()  # uploads in progress, by address
        figures.gauges["rtdetr_queue_depth"] = "Files that wait for a batch.", self.batcher.files.qsize
        figures.gauges["rtdetr_uploads"] = "Files that are on their way.", self.arriving.total
        figures.gauges["rtdetr_requests_inside"] = "Requests let in and not yet answered.", self._inside

    async def answer(self, request: Request) -> Answer:
        """Answers a request. Raises HTTPException, see REFUSALS."""
        async with Upload(request, self.settings.max_megabytes) as upload:
            self._check_room()
            try:
                with self._counted(network_of(request)):
                    data = await upload.read()
            except ClientDisconnect as error:  # no client receives this
                raise HTTPException(HUNG_UP, "the client closed the connection before its file had arrived") from error
            self._check_room()
            self.working += 1
            try:
                return await self.batcher.answer(data)
            except DataError as error:
                if isinstance(error.__cause__, Image.DecompressionBombError):
                    limit = f"{self.settings.max_megapixels:g} megapixels"
                    raise HTTPException(413, f"the image has more than {limit}; send a smaller one") from error
                raise HTTPException(415, str(error)) from error
            finally:
                self.working -= 1

    def _inside(self) -> int:
        return self.working + self.arriving.total()

    def _check_room(self) -> None:
        if self.working >= self.settings.slots:
            raise _busy(f"requests in work: {self.working}, the most that this server takes")

    @contextmanager
    def _counted(self, network: str) -> Iterator[None]:
        if self.arriving.total() >= 2 * self.settings.slots:
            raise _busy(f"{self.arriving.total()} uploads are in progress, the most that this server accepts")
        if self.arriving[network] >= self.settings.slots:
            raise _busy(f"{self.arriving[network]} uploads from {network} are in progress, the most from one address")
        self.arriving[network] += 1
        try:
            yield
        finally:
            self.arriving[network] -= 1
            self.arriving += Counter()  # removes counts of 0


def _busy(sentence: str) -> HTTPException:
    return HTTPException(503, f"{sentence}; try again soon", {"Retry-After": "1"})


def network_of(request: Request) -> str:
    """Returns the client's address; for IPv6 the first 64 bits, which belong to one customer, unless they hold an
    address of IPv4."""
    host = request.client.host if request.client is not None else "unknown"
    with suppress(ValueError):  # the socket of a test, or an invalid address from a proxy
        if ":" in host:
            address = ipaddress.IPv6Address(host.partition("%")[0])
            return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
    return host


def requested_thresholds(texts: Sequence[str], class_names: Sequence[str]) -> dict[str, float]:
    """Parses the thresholds of a request, X for all classes or CLASS=X. Returns them by class name; that of all classes
    has the name "". Raises HTTPException."""
    given = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if name and name not in class_names:
            near = difflib.get_close_matches(name, class_names, n=1, cutoff=0.0)[0]
            raise HTTPException(422, f"threshold: the model has no class {name!r}; did you mean {near!r}?")
        try:
            given[name] = float(number)
        except ValueError:
            given[name] = -1.0
        if not 0 <= given[name] <= 1:  # NaN, too
            raise HTTPException(422, f"threshold: expected a number from 0 to 1, or CLASS=X, got {text!r}")
    return given


def build_app(detect: Detect, settings: Settings) -> FastAPI:
    """Returns the application. detect: images to detections of every score, best first, called from one thread."""
    figures = Figures()
    handler = RequestHandler(detect, settings, figures)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with handler.batcher.running():
            yield

    app = FastAPI(
        title="rtdetr", version=rtdetr.__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )  # FastAPI's own /docs loads files from another host
    app.add_middleware(Measured, figures=figures)
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": Refusal, "description": says} for status, says in REFUSALS.items()
    }

    @app.exception_handler(500)
    async def failed(_: Request, __: Exception) -> JSONResponse:  # the error is raised again, and logged
        return JSONResponse({"detail": REFUSALS[500]}, 500)

    @app.post("/detect", response_model=DetectedImage, responses=refusals, openapi_extra=TAKES)
    async def detect_objects(request: Request, threshold: list[str] = THRESHOLDS) -> Response:
        """Detects objects in one image: the body of the request, or a form with a file. Boxes are x1, y1, x2, y2 in
        pixels of the image, rotated upright by its EXIF orientation. threshold: lowest score of all classes, or of one;
        default: those of the server."""
        if unknown := request.query_params.keys() - {"threshold"}:
            raise HTTPException(422, f"{min(unknown)}: no such parameter, expected threshold")
        asked = requested_thresholds(threshold, settings.class_names)
        by_id = {} if "" in asked else settings.thresholds
        of_all = asked.get("", settings.threshold)
        found = await handler.answer(request)
        shown = [
            each for each in found.detections if each.score >= asked.get(each.name, by_id.get(each.category_id, of_all))
        ]
        return JSONResponse({"width": found.width, "height": found.height, "detections": as_json(shown)})

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, object]:
        """Status and limits of the server."""
        return {"status": "ok", **settings._asdict(), "thresholds": dict(settings.thresholds)}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Metrics for Prometheus."""
        return PlainTextResponse(figures.text(), media_type="text/plain; version=0.0.4")

    for path, file in (("/", "page.html"), ("/docs", "docs.html")):
        app.add_route(path, partial(_page, HERE / file), include_in_schema=False)
    return app


def _page(file: Path, _: Request) -> FileResponse:
    return FileResponse(file, headers=OWN_ONLY)
