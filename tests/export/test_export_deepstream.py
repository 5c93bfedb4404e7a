"""The parser for DeepStream: compiled against the names that it uses, it takes the boxes that Python takes."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from rtdetr.models.postprocess import postprocess
from rtdetr.types import Predictions

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "deepstream"
HEADERS = Path(__file__).resolve().parents[1] / "support" / "deepstream"
QUERIES, CLASSES, WIDTH, HEIGHT = 12, 3, 96, 64

# Reads logits and boxes from stdin, prints class, score, left, top, right, bottom.
PROGRAM = """
#include <cstdio>
#include <string>
#include "parser.cpp"
int main(int, char** words) {
  std::vector<float> logits(Q * C), boxes(Q * 4);
  if (std::fread(logits.data(), 4, Q * C, stdin) + std::fread(boxes.data(), 4, Q * 4, stdin) != Q * (C + 4)) return 3;
  NvDsInferLayerInfo first{}, second{};
  first.layerName = words[1], first.buffer = logits.data(), first.inferDims = {2, {Q, C}, Q * C};
  second.layerName = "boxes", second.buffer = boxes.data(), second.inferDims = {2, {Q, 4}, Q * 4};
  std::vector<NvDsInferParseObjectInfo> objects;
  const unsigned classes = std::stoi(words[2]);
  const NvDsInferParseDetectionParams parameters{classes, std::vector<float>(classes, 0.3f), {}};
  if (!NvDsInferParseRtdetr({second, first}, {WIDTH, HEIGHT, 3}, parameters, objects)) return 2;
  for (const auto& each : objects)
    std::printf("%u %.9g %.9g %.9g %.9g %.9g\\n", each.classId, each.detectionConfidence, each.left, each.top,
                each.left + each.width, each.top + each.height);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("deepstream")
    (folder / "main.cpp").write_text(PROGRAM)
    defined = [f"-D{name}={value}u" for name, value in (("Q", QUERIES), ("C", CLASSES))]
    defined += [f"-DWIDTH={WIDTH}", f"-DHEIGHT={HEIGHT}"]
    command = [
        "g++",
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Wno-unused-function",
        *defined,
        f"-I{EXAMPLE}",
        f"-I{HEADERS}",
    ]
    subprocess.run([*command, str(folder / "main.cpp"), "-o", str(folder / "main")], check=True)
    return folder / "main"


def test_the_parser_takes_what_postprocess_takes(program: Path) -> None:
    """Boxes beyond the image are cut, those outside and those that are no numbers are left out."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(QUERIES, CLASSES, generator=generator)
    boxes = torch.rand(QUERIES, 4, generator=generator)
    boxes[0], logits[1] = torch.tensor([2.0, 2.0, 0.1, 0.1]), torch.nan
    sent = logits.numpy().tobytes() + boxes.numpy().tobytes()
    done = subprocess.run([str(program), "logits", str(CLASSES)], input=sent, capture_output=True, check=True)
    found = np.array([line.split() for line in done.stdout.decode().splitlines()], np.float64)
    keep = [i > 0 for i in range(QUERIES)]
    keep[1] = False
    chosen = Predictions(logits[keep][None], boxes[keep][None])
    expected = postprocess(chosen, torch.tensor([[HEIGHT, WIDTH]]))
    count = int((expected.scores >= 0.3).sum())
    cut = expected.boxes[0, :count].clamp(min=0).minimum(torch.tensor([WIDTH, HEIGHT] * 2))
    assert len(found) == count > 5
    assert found[:, 0].tolist() == expected.labels[0, :count].tolist()
    np.testing.assert_allclose(found[:, 1], expected.scores[0, :count], atol=1e-6)
    np.testing.assert_allclose(found[:, 2:], cut, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "classes", "why"),
    [
        ("scores", CLASSES, "the model has no output `logits`; export it with --raw"),
        ("logits", CLASSES + 1, f"num-detected-classes: expected {CLASSES}, got {CLASSES + 1}"),
    ],
)
def test_what_does_not_fit_is_one_sentence(program: Path, name: str, classes: int, why: str) -> None:
    sent = bytes(4 * QUERIES * (CLASSES + 4))
    done = subprocess.run([str(program), name, str(classes)], input=sent, capture_output=True)
    assert done.returncode == 2 and done.stderr.decode().strip() == why


def test_the_configuration_names_the_parser() -> None:
    config = configparser.ConfigParser()
    config.read(EXAMPLE / "config_infer.txt")
    given = config["property"]
    assert f"bool {given['parse-bbox-func-name']}(" in (EXAMPLE / "parser.cpp").read_text()
    assert float(given["net-scale-factor"]) == pytest.approx(1 / 255) and given["cluster-mode"] == "4"
