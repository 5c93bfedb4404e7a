"""Warm starts from weights of other origin. The files are made here, in the layouts of their origins, from the official
formula weights; the names are those that the public code of each project gives its entries.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import message
from parity import config_of, official_state, write_pdparams
from torch import Tensor

from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import CheckpointError
from rtdetr.weights.compare import compare
from rtdetr.weights.foreign import read_entries, to_official
from rtdetr.weights.load import warm_start
from rtdetr.weights.official import load_foreign_weights
from rtdetr.weights.official_names import official_layout, official_names
from rtdetr.weights.pdparams import ConvertError
from rtdetr.weights.training_parts import OTHER_SELECTOR


@pytest.fixture(scope="module")
def official() -> dict[str, Tensor]:
    """Formula weights under official names, in torch's layout."""
    return {name: official_layout(name, torch.from_numpy(array)) for name, array in official_state("r18").items()}


@pytest.fixture(scope="module")
def expected(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under our names."""
    with torch.device("meta"):
        names = official_names(build_model(config_of("r18").model, 80).state_dict())
    return {ours: official[name] for ours, name in names.items()}


class TestForeignWeights:
    """Warm starts. The files are made here in the layouts of their origins from the official formula weights."""

    def check(self, path: Path, expected: dict[str, Tensor], wanted: Callable[[str], bool]) -> None:
        """The warm start takes exactly the wanted entries, with their values, and nothing is left over. The selectors
        of other groups are those of the file, or as its only one."""
        model = build_model(config_of("r18").model, 80)
        report = warm_start(model, path)
        taken = {name: name for name in expected if wanted(name)}
        if "decoder.selector.proj.weight" in taken:
            others = {name: OTHER_SELECTOR.sub("decoder.selector.", name) for name in expected}
            taken = {name: source for name, source in others.items() if name != source} | taken
        assert sorted(report.matched) == sorted(taken)
        assert not report.unexpected and not report.mismatched
        own = model.state_dict()
        assert all(torch.equal(own[name], expected[taken[name]]) for name in report.matched)

    @pytest.mark.parametrize("prefix", ["", "backbone."])
    def test_paddle_backbone(self, prefix: str, expected: dict[str, Tensor], tmp_path: Path) -> None:
        state = {
            prefix + name.removeprefix("backbone."): array
            for name, array in official_state("r18").items()
            if name.startswith("backbone.")
        }
        path = write_pdparams(tmp_path / "ResNet18_vd_pretrained.pdparams", state)
        self.check(path, expected, lambda name: name.startswith("backbone."))

    def test_torch_backbone(self, official: dict[str, Tensor], expected: dict[str, Tensor], tmp_path: Path) -> None:
        backbone = {
            torch_name(n).removeprefix("backbone."): t for n, t in official.items() if n.startswith("backbone.")
        }
        backbone["conv1.conv1_1.norm.num_batches_tracked"] = torch.tensor(7)
        torch.save(backbone, tmp_path / "ResNet18_vd_pretrained_from_paddle.pth")
        self.check(tmp_path / "ResNet18_vd_pretrained_from_paddle.pth", expected, lambda n: n.startswith("backbone."))

    @pytest.mark.parametrize("version", [1, 2])
    def test_rtdetr(
        self, version: int, official: dict[str, Tensor], expected: dict[str, Tensor], tmp_path: Path
    ) -> None:
        """The averaged weights come first; the raw ones beside them are other numbers."""
        state = rtdetr_state(official, version)
        raw = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        content = {"last_epoch": 71, "model": raw, "ema": {"module": state, "updates": 5}, "date": "today"}
        torch.save(content, tmp_path / "rtdetr.pth")
        official_of = official_names(expected)
        self.check(tmp_path / "rtdetr.pth", expected, lambda name: in_rtdetr(official_of[name]))

    def test_rtdetr_in_paddle(self, expected: dict[str, Tensor], tmp_path: Path) -> None:
        state = rtdetr_in_paddle(official_state("r18"))
        path = write_pdparams(tmp_path / "rtdetr_r18vd_6x_coco.pdparams", state)
        official_of = official_names(expected)
        self.check(path, expected, lambda name: in_rtdetr(official_of[name]))

    def test_detrs(self, official: dict[str, Tensor], expected: dict[str, Tensor], tmp_path: Path) -> None:
        """Official names with torch's statistics, and two derived buffers."""
        state = {
            n.replace("._mean", ".running_mean").replace("._variance", ".running_var"): t for n, t in official.items()
        }
        state |= {"aux_o2m_head.anchor_points": torch.ones(4, 2), "aux_o2m_head.stride_tensor": torch.ones(4, 1)}
        torch.save(
            {"model": {f"module.{n}": t for n, t in state.items()}, "metadata": {"source": "x"}}, tmp_path / "d.pth"
        )
        self.check(tmp_path / "d.pth", expected, lambda name: True)

    @pytest.mark.parametrize("prefix", ["module._orig_mod.", "_orig_mod.module."])
    def test_prefixes_of_wrappers_are_stripped(self, prefix: str, tmp_path: Path) -> None:
        torch.save({"model": {f"{prefix}backbone.res2.w": torch.zeros(2)}}, tmp_path / "w.pth")
        path = tmp_path / "w.pth"
        assert [*to_official(read_entries(path), path)] == ["backbone.res2.w"]

    def test_unknown_entries_are_left_over(self, official: dict[str, Tensor], tmp_path: Path) -> None:
        state = {**rtdetr_state(official, 2), "decoder.tgt_embed.weight": torch.ones(300, 256)}
        torch.save({"model": state}, tmp_path / "w.pth")
        own = build_model(config_of("r18").model, 80).state_dict()
        report = compare(own, load_foreign_weights(tmp_path / "w.pth"))
        assert report.unexpected == ["transformer.tgt_embed.weight"]

    def test_other_number_of_classes_is_mismatched(self, official: dict[str, Tensor], tmp_path: Path) -> None:
        torch.save({"model": rtdetr_state(official, 1)}, tmp_path / "w.pth")
        own = build_model(config_of("r18").model, 3).state_dict()
        report = compare(own, load_foreign_weights(tmp_path / "w.pth"))
        assert {each.split(" ")[0].split(".")[-2] for each in report.mismatched} >= {"score_head", "label_embedding"}
        assert "decoder.box_heads.0.layers.0.weight" in report.matched

    def test_read_entries_of_a_memory_dump(self, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        torch.save([torch.ones(2)], buffer)
        (tmp_path / "list.pth").write_bytes(buffer.getvalue())
        with pytest.raises(ConvertError, match="expected a dict of tensors, got list"):
            read_entries(tmp_path / "list.pth")
        (tmp_path / "cut.pth").write_bytes(buffer.getvalue()[:200])
        with pytest.raises(CheckpointError, match=message("damaged", "cut.pth")):
            read_entries(tmp_path / "cut.pth")


def in_rtdetr(official_name: str) -> bool:
    """Has RT-DETR v1/v2 this part? It has one query group, no memory map and no dense head."""
    if official_name.startswith("aux_o2m_head.") or ".map_memory." in official_name:
        return False
    group = official_name.split(".")[2] if ".enc_" in official_name else "0"
    return group == "0"


def rtdetr_in_paddle(official: dict[str, Any]) -> dict[str, Any]:
    """What RT-DETR v1 has of an official state, under the names of its Paddle release."""
    state = {}
    for name, array in official.items():
        if in_rtdetr(name):
            single = name.replace("enc_output.0.", "enc_output.").replace("_head.0.layers", "_head.layers")
            single = single.replace("enc_score_head.0.", "enc_score_head.")
            state[name if ".dec_" in name else single] = array
    return state


def with_torch_statistics(name: str) -> str:
    return name.replace("._mean", ".running_mean").replace("._variance", ".running_var")


def torch_name(name: str) -> str:
    """The name in RT-DETR's PyTorch code of a backbone entry or a batch norm statistic, written out by hand."""
    parts = with_torch_statistics(name).split(".")
    if len(parts) > 2 and parts[1].startswith("res"):
        block = "abcdef".index(parts[2][4])
        parts[1:3] = ["res_layers", str(int(parts[1][3]) - 2), "blocks", str(block)]
    return ".".join(parts)


def rtdetr_state(official: dict[str, Tensor], version: int) -> dict[str, Tensor]:
    """A state dict as RT-DETR v1 or v2 (PyTorch) saves it."""
    state = {}
    for name, tensor in official.items():
        if not in_rtdetr(name):
            continue
        new = torch_name(name).replace(".bn.", ".norm.")
        new = new.replace("neck.", "encoder.", 1).replace("transformer.", "decoder.", 1)
        new = new.replace("_head.0.", "_head.") if ".enc_" in new else new
        if version == 2:
            new = new.replace("enc_output.0.0.", "enc_output.proj.").replace("enc_output.0.1.", "enc_output.norm.")
            if new.startswith("encoder.input_proj."):
                parts = new.split(".")
                parts[3] = {"0": "conv", "1": "norm"}[parts[3]]
                new = ".".join(parts)
        new = new.replace("enc_output.0.0.", "enc_output.0.").replace("enc_output.0.1.", "enc_output.1.")
        if new == "decoder.denoising_class_embed.weight":
            tensor = torch.cat((tensor, torch.zeros(1, tensor.shape[1])))
        state[new] = tensor
    if version == 2:
        state |= {"decoder.anchors": torch.ones(1, 8400, 4), "decoder.valid_mask": torch.ones(1, 8400, 1)}
        state["decoder.decoder.layers.0.cross_attn.num_points_scale"] = torch.ones(12)
    return state
