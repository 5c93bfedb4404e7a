"""`rtdetr export`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rtdetr.commands.arguments import Parser, add_kernels
from rtdetr.foreign_names import unknown_format

FORMATS = (
    *("onnx", "torch-export", "aot", "openvino", "tensorrt", "triton"),
    *("transformers", "executorch", "litert", "coreml", "ncnn"),
)
OF_NEW_FILES = (  # options that --check does not take
    *("format", "output", "half", "int8", "calibrate", "raw", "input"),
    *("portable", "sampling", "opset", "ap"),
)
ABOUT = """Write a model in a format that runs without this project, and compare it with PyTorch.

    rtdetr export best.pth --format onnx               one file; batch, height and width are dynamic
    rtdetr export best.pth --format onnx --half        float16
    rtdetr export best.pth --int8 --calibrate IMAGES   8 bits; --ap DATA measures their AP
    rtdetr export best.pth --portable --operators      for small runtimes: one size, no GridSample, no TopK
    rtdetr export best.pth --format transformers -o X  a folder for AutoModelForObjectDetection
    rtdetr export best.pth --format executorch         a .pte file for phones; litert, coreml, ncnn likewise
    rtdetr export best.pth --format triton             a model repository: an ONNX file and config.pbtxt
    rtdetr export best.pth --check best.onnx           compare an existing file

An export is finished when its outputs agree with PyTorch: FILE.certificate.json says on what and how well. One that
does not agree is left as FILE.failed.
"""


def run(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)

    from rtdetr.commands.progress import say_above_bar
    from rtdetr.config import ConfigError
    from rtdetr.export import check_file, export_model, targets
    from rtdetr.export.onnx import operators
    from rtdetr.models.portable import Sampling
    from rtdetr.ops.kernels import Kernels, using
    from rtdetr.outputs import check_outputs, writing

    targets.check_source(args.weights)
    if args.check:
        if given := [f"--{name}" for name in OF_NEW_FILES if getattr(args, name) not in (None, False)]:
            raise ConfigError(f"--check: compares a file as it is, so leave out {', '.join(given)}")
        file = args.check
    else:
        if args.sampling and not args.portable:
            raise ConfigError("--sampling needs --portable")
        args.format, args.input = args.format or "onnx", args.input or "uint8"
        portable: Sampling | None = (args.sampling or "gather") if args.portable else None
        file = args.output or targets.default(args.weights, args.format, args.half, args.int8, args.raw, portable)
        targets.check(file, args.format)
        check_outputs(targets.of(file, args.format), [args.weights], args.overwrite)
    if args.operators and file.suffix != ".onnx":
        raise ConfigError(f"--operators: expected an ONNX file, got {file}")
    kernels: Kernels = args.kernels or "auto"  # the config's value is for training
    say = partial(say_above_bar, file=sys.stdout)
    with writing(file), using(kernels):
        if args.check:
            certificate = check_file(args.weights, file, args.images, say=say).certificate
        else:
            certificate = export_model(
                args.weights,
                args.format,
                file,
                args.half,
                args.raw,
                int8=args.int8,
                calibrate=args.calibrate,
                input_type=args.input,
                portable=portable,
                opset=args.opset,
                images=args.images,
                ap=args.ap,
                say=say,
            ).certificate
    size = "" if args.check else f"{certificate.num_bytes / 1e6:.1f} MB, "
    verdict = "not run here, so not compared with" if certificate.not_run else "agrees with"
    print(f"{file}: {size}{verdict} {args.weights}")
    if args.operators:
        print(f"operators: {', '.join(f'{name} {count}' for name, count in operators(file).items())}")
    if args.int8 and args.ap is None:
        print(f"the AP that 8 bits cost depends on the model: --ap or `rtdetr eval {file}` measures it")
    return 0


def _format(text: str) -> str:
    if text not in FORMATS:
        raise argparse.ArgumentTypeError(unknown_format(text, FORMATS))
    return text


def _parser() -> argparse.ArgumentParser:
    codes = "Exit codes: 0 done, 1 the file does not agree with the model, 2 nothing was started."
    parser = Parser("export", ABOUT, codes)
    parser.add_weights("a checkpoint of this project")
    parser.add_argument("--format", type=_format, choices=FORMATS, help="default: onnx")
    text = "default: in the folder of WEIGHTS, with its name; openvino, transformers, triton, coreml, ncnn are folders"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=text)
    parser.add_argument("--half", action="store_true", help="float16 weights and arithmetic; heads stay float32")
    text = "8-bit convolutions (onnx, triton, executorch, litert), with --calibrate"
    parser.add_argument("--int8", action="store_true", help=text)
    text = "about 100 typical images, from which --int8 takes the ranges"
    parser.add_argument("--calibrate", type=Path, metavar="FOLDER", help=text)
    text = "logits (B, Q, C) and boxes (B, Q, 4) cxcywh normalised, instead of labels, boxes in pixels and scores"
    parser.add_argument("--raw", action="store_true", help=text)
    text = "input of the file: uint8 images or float32 in [0, 1]; default: uint8"
    parser.add_argument("--input", choices=("uint8", "float"), help=text)
    text = "for one image of one size, without GridSample, TopK, GatherND, tensors of 5 axes, infinite numbers"
    parser.add_argument("--portable", action="store_true", help=text)
    text = "how --portable samples: gather, or products of matrices for runtimes without Gather; default: gather"
    parser.add_argument("--sampling", choices=("gather", "products"), help=text)
    text = "ONNX opset of --portable: 13, 17 or 18; default: 17"
    parser.add_argument("--opset", type=int, metavar="N", help=text)
    parser.add_argument("--operators", action="store_true", help="list the operators of an ONNX file")
    text = "compare on images of this folder; default: those of --calibrate, else generated ones"
    parser.add_argument("--images", "--pictures", type=Path, metavar="FOLDER", help=text)
    text = "AP on this validation set, before and after, for the certificate; any known form, as eval --data"
    parser.add_argument("--ap", metavar="DATA", help=text)
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare an existing FILE with WEIGHTS")
    add_kernels(parser, "auto")
    parser.add_overwrite()
    return parser
