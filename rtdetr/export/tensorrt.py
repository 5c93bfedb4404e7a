"""TensorRT: a script that builds an engine on a machine with TensorRT, next to the ONNX file that it reads."""

from __future__ import annotations

import ast
from pathlib import Path

from rtdetr.export.graph import fitting
from rtdetr.export.onnx import float32_nodes
from rtdetr.export.targets import script_path
from rtdetr.inference.export_metadata import Metadata

# float16 would be too coarse or overflow: --half keeps these in float32, and the engine uses the types of the file.
FLOAT32_OPERATORS = {
    "Add", "Clip", "Conv", "Div", "Exp", "Gemm", "GridSample", "LayerNormalization", "Log", "MatMul", "Mul",
    "ReduceSum", "Relu", "Sigmoid", "Sub", "TopK",
}  # fmt: skip
MOST_PIXELS = 1.6  # of the largest side in the profile, relative to the model's own

SCRIPT = '''"""Builds a TensorRT engine from {onnx}. Needs tensorrt 10 or newer and the GPU that shall run it.

    python {script} [ENGINE]

Written by rtdetr {version}. It was checked without TensorRT: it parses, and the layers it names are in the ONNX file,
in float32. No engine has been built or compared. A first test:

    trtexec --onnx={onnx} --stronglyTyped --noTF32 {shapes}
"""

import sys
from pathlib import Path

import tensorrt as trt

HERE = Path(__file__).resolve().parent
# input: smallest, usual and largest shape
PROFILE = {{
{profile}
}}
# what float16 would make coarse or infinite
KEEP_FLOAT32 = [
{keep}
]


def main():
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    # the types of the ONNX file, float16 and float32, are those of the engine
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(HERE / "{onnx}")):
        sys.exit("\\n".join(str(parser.get_error(i)) for i in range(parser.num_errors)))
    for layer in map(network.get_layer, range(network.num_layers)):
        if layer.name in KEEP_FLOAT32 and layer.get_output(0).dtype == trt.float16:
            sys.exit(f"{{layer.name}}: TensorRT takes it in float16, which is too coarse for it")
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # it has no more digits than float16
    profile = builder.create_optimization_profile()
    for name, shapes in PROFILE.items():
        profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        sys.exit("no engine was built; the lines above say why")
    target = Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "{engine}")
    target.write_bytes(engine)
    print(f"{{target}}: {{target.stat().st_size / 1e6:.1f}} MB")


if __name__ == "__main__":
    main()
'''


def write_script(onnx_file: Path, metadata: Metadata) -> Path:
    """Writes the builder script next to an ONNX file, float32 or float16."""
    keep = [name for name, kind in float32_nodes(onnx_file).items() if kind in FLOAT32_OPERATORS]
    height, width = metadata.config.data.image_size
    large = [-(-round(side * MOST_PIXELS) // 32) * 32 for side in (height, width)]
    small = fitting(0, 0, metadata.config.model.decoder.num_queries)  # TopK needs a cell for every query
    if small[0] > height or small[1] > width:  # the smallest shape of a profile exceeds no side of the usual one
        small = (height, width)
    profile: dict[str, tuple[tuple[int, ...], ...]] = {
        "images": ((1, 3, *small), (1, 3, height, width), (8, 3, *large))
    }
    if not metadata.raw:
        profile["sizes"] = ((1, 2), (1, 2), (8, 2))
    path = script_path(onnx_file)
    names = ("minShapes", "optShapes", "maxShapes")
    shapes = " ".join(
        f"--{option}={','.join(f'{name}:' + 'x'.join(map(str, each[i])) for name, each in profile.items())}"
        for i, option in enumerate(names)
    )
    text = SCRIPT.format(
        onnx=onnx_file.name,
        script=path.name,
        engine=onnx_file.with_suffix(".engine").name,
        version=metadata.version,
        shapes=shapes,
        profile="\n".join(f"    {name!r}: {shape}," for name, shape in profile.items()),
        keep="\n".join(f"    {name!r}," for name in keep if metadata.precision == "fp16"),
    )
    path.write_text(text, encoding="utf-8")
    return path


def check_script(script: Path, onnx_file: Path) -> str:
    """The fault of a script, as far as it shows without TensorRT; empty if there is none."""
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except SyntaxError as error:
        return f"{script.name} does not parse ({error})"
    kept = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KEEP_FLOAT32"
    )
    unknown = sorted(set(kept) - float32_nodes(onnx_file).keys())
    if unknown:
        return (
            f"{script.name} names layers that are not in {onnx_file.name}, or not in float32: {', '.join(unknown[:3])}"
        )
    return ""
