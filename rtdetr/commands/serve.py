"""`rtdetr serve`"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Sequence

from rtdetr.commands.arguments import Parser, add_kernels, integer, thresholds
from rtdetr.garbage_collection import collection_paused
from rtdetr.gpu_startup import wake_gpu
from rtdetr.wording import reason_of

ABOUT = """Detect over HTTP: POST /detect, a page at /, documentation at /docs, GET /health, Prometheus metrics at
/metrics.

    rtdetr serve best.pth
    curl --data-binary @image.jpg http://127.0.0.1:8000/detect

After Ctrl-C or SIGTERM it answers all accepted requests and exits with 0. A second Ctrl-C ends it at once, with 130.
"""


def run(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("serve", ABOUT)
    parser.add_weights("a checkpoint of this project")
    text = "address to listen at (default: %(default)s, this machine only); 0.0.0.0: any network"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    parser.add_argument("--port", type=integer(0, 65535), default=8000, help="default: %(default)s; 0: any free port")
    parser.add_threshold("lowest score unless a request sets it (default: those in the weights, else 0.5)")
    text = "largest batch (default: %(default)s)"
    parser.add_argument("--max-batch", type=integer(1, 1024), default=8, metavar="N", help=text)
    text = "requests in progress or waiting; further ones are answered with 503 (default: %(default)s)"
    parser.add_argument("--queue", type=integer(1, 100_000), default=64, metavar="N", help=text)
    text = "largest file (default: %(default)s)"
    parser.add_argument("--max-megabytes", type=integer(1, 2000), default=20, metavar="N", help=text)
    text = "largest image (default: %(default)s)"
    parser.add_argument("--max-megapixels", type=integer(1, 10_000), default=50, metavar="N", help=text)
    parser.add_device()
    add_kernels(parser)
    args = parser.parse_args(arguments)
    wake_gpu(args.device)

    from rtdetr.extras import optional

    for module in ("fastapi", "uvicorn", "python_multipart"):
        optional(module, "serve", "`rtdetr serve`")

    with collection_paused():
        from rtdetr.config import ConfigError
        from rtdetr.engine.distributed import choose_device
        from rtdetr.inference.predictor import Predictor
        from rtdetr.inference.runtimes import is_exported
        from rtdetr.inference.thresholds import lowest_scores
        from rtdetr.serve.app import Settings, build_app

    with listener(args.host, args.port) as socket_:
        options = {"kernels": args.kernels} if args.kernels else {}
        if is_exported(args.weights):
            raise ConfigError(f"{args.weights}: is an exported file, expected the checkpoint that it came from")
        predictor = Predictor(args.weights, choose_device(args.device), threshold=0.0, **options)
        limits = (args.max_batch, args.queue, args.max_megabytes, args.max_megapixels)
        lowest, classes = lowest_scores(predictor.classes, *thresholds(args.threshold)), predictor.classes
        each = {} if isinstance(lowest, float) else dict(zip(classes.category_ids, lowest.tolist()))
        shared = lowest if isinstance(lowest, float) else lowest.min()
        settings = Settings(args.weights.name, classes.names, float(shared), *limits, each)
        return _serve(build_app(predictor.predict, settings), socket_)


def listener(host: str, port: int) -> socket.socket:
    """Returns a socket bound to that address, not yet listening. Raises ConfigError."""
    from rtdetr.config import ConfigError

    socket_ = None
    try:
        # asyncio sends answers at once only if the protocol is named; else keep-alive clients wait 40 ms for each.
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket_ = socket.socket(family, kind, protocol)
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socket_.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        if socket_ is not None:
            socket_.close()
        place = f"--host {host} --port {port}"
        raise ConfigError(f"{place}: cannot be listened at ({reason_of(error)}); choose another") from error
    return socket_


def _serve(app: object, socket_: socket.socket) -> int:
    from rtdetr.engine.signals import StopSignal
    from rtdetr.serve.server import BACKLOG, build_server

    host, port = socket_.getsockname()[:2]
    if not ipaddress.ip_address(host).is_loopback:
        print(
            f"listening at {host}: everyone who can reach this machine can use it, without a password", file=sys.stderr
        )
    shown = f"[{host}]" if ":" in host else host
    server = build_server(app)
    socket_.listen(BACKLOG)  # clients may connect as soon as the next line is printed
    print(f"http://{shown}:{port}  (Ctrl-C ends it)", flush=True)
    # uvicorn raises the signal that stopped it again, for the previous handler; StopSignal receives it here.
    with StopSignal().listening():
        server.run(sockets=[socket_])
    print("stopped; all accepted requests are answered", file=sys.stderr)
    return 0
