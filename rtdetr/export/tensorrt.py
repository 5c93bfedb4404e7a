"""TensorRT: the script that builds an engine where TensorRT is, beside the ONNX file that it reads."""

from __future__ import annotations

import ast
from pathlib import Path

from rtdetr.export.onnx import node_names
from rtdetr.export.targets import script_path
from rtdetr.inference.metadata import Metadata

# What float16 would make infinite or coarse: normalisations, softmax, places of the deformable attention, box logits.
FLOAT32_OPERATORS = {
    "Div", "Exp", "GridSample", "LayerNormalization", "Log", "Pow", "ReduceMean", "ReduceSum", "Sigmoid", "Softmax",
    "Sqrt", "TopK",
}  # fmt: skip
HEAD_OPERATORS = {"Add", "Clip", "Gemm", "MatMul", "Mul", "Relu", "Sub"}
FLOAT32_SCOPES = ("", "decoder", "decoder.selector")  # what these compute themselves: heads, anchors, post-processing
MOST_PIXELS = 1.6  # of the largest side in the profile, relative to the model's own

SCRIPT = '''"""Builds a TensorRT engine from {onnx}. Needs tensorrt 10 or newer and the GPU that shall run it.

    python {script} [ENGINE]

Written by rtdetr {version}. It was checked without TensorRT: it parses, and the layers it names are in the ONNX file.
No engine has been built or compared. A first test:

    trtexec --onnx={onnx} --fp16 {shapes}
"""

import sys
from pathlib import Path

import tensorrt as trt

HERE = Path(__file__).resolve().parent
FP16 = {fp16}
# input: smallest, usual and largest shape
PROFILE = {{
{profile}
}}
# what float16 would make infinite or coarse
KEEP_FLOAT32 = {{
{keep}
}}


def main():
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(HERE / "{onnx}")):
        sys.exit("\\n".join(str(parser.get_error(i)) for i in range(parser.num_errors)))
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for name, shapes in PROFILE.items():
        profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
    if FP16:
        config.set_flag(trt.BuilderFlag.FP16)
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
        for i in range(network.num_layers):
            layer = network.get_layer(i)
            floats = [layer.get_output(j).dtype in (trt.float32, trt.float16) for j in range(layer.num_outputs)]
            if layer.name in KEEP_FLOAT32 and floats and all(floats):
                layer.precision = trt.float32
                for j in range(layer.num_outputs):
                    layer.set_output_type(j, trt.float32)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        sys.exit("no engine was built; the lines above say why")
    target = Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "{engine}")
    target.write_bytes(engine)
    print(f"{{target}}: {{target.stat().st_size / 1e6:.1f}} MB")


if __name__ == "__main__":
    main()
'''


def write_script(onnx_file: Path, metadata: Metadata, fp16: bool) -> Path:
    """The builder script beside an ONNX file of float32, checked as far as it goes without TensorRT."""
    nodes = node_names(onnx_file)
    keep = [
        name
        for name, kind in nodes.items()
        if kind in FLOAT32_OPERATORS or (kind in HEAD_OPERATORS and _scope(name) in FLOAT32_SCOPES)
    ]
    height, width = metadata.config.data.image_size
    large = [-(-round(side * MOST_PIXELS) // 32) * 32 for side in (height, width)]
    profile: dict[str, tuple[tuple[int, ...], ...]] = {
        "images": ((1, 3, 32 * 3, 32 * 3), (1, 3, height, width), (8, 3, *large))
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
        fp16=fp16,
        shapes=shapes,
        profile="\n".join(f"    {name!r}: {shape}," for name, shape in profile.items()),
        keep="\n".join(f"    {name!r}," for name in keep),
    )
    path.write_text(text, encoding="utf-8")
    return path


def check_script(script: Path, onnx_file: Path) -> str:
    """What is wrong with a script as far as can be told without TensorRT, empty when nothing is."""
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except SyntaxError as error:
        return f"{script.name} does not parse ({error})"
    constants = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper() and target.id != "HERE"
    }
    unknown = sorted(constants["KEEP_FLOAT32"] - set(node_names(onnx_file)))
    if unknown:
        return f"{script.name} names layers that are not in {onnx_file.name}: {', '.join(unknown[:3])}"
    return ""


def _scope(node: str) -> str:
    """The module that a node belongs to, see onnx.py."""
    return node.rpartition("/")[0]
