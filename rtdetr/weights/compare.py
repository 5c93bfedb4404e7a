"""What a weight file has in common with a model, in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

SHOWN_NAMES = 6  # of each kind, in messages


class LoadReport(NamedTuple):
    """What became of the entries of a weight file."""

    matched: list[str]
    missing: list[str]  # in the model only
    unexpected: list[str]  # in the file only
    mismatched: list[str]  # in both, with different shapes: "name (file's shape, model's shape)"

    def text(self, shown: int = SHOWN_NAMES) -> str:
        """Several lines: share of the model that was loaded, then up to `shown` names of each kind that was not."""
        total = len(self.matched) + len(self.missing) + len(self.mismatched)
        lines = [
            f"loaded {len(self.matched)} of {total} entries of the model ({len(self.matched) / max(total, 1):.1%})"
        ]
        for kind, names in (
            ("missing in the file, kept as they were", self.missing),
            ("of another shape, kept as they were", self.mismatched),
            ("left over in the file", self.unexpected),
        ):
            if names:
                more = f", and {len(names) - shown} more" if len(names) > shown else ""
                lines.append(f"  {len(names)} {kind}: {', '.join(names[:shown])}{more}")
        return "\n".join(lines)


def compare(model: nn.Module, weights: Mapping[str, Tensor]) -> LoadReport:
    """Which entries of `weights` fit the model by name and shape. `num_batches_tracked` counts for nothing."""
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    given = {name: tensor for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    both = [name for name in own if name in given]
    fitting = [name for name in both if own[name].shape == given[name].shape]
    mismatched = [
        f"{name} ({tuple(given[name].shape)}, {tuple(own[name].shape)})" for name in both if name not in set(fitting)
    ]
    missing, unexpected = [n for n in own if n not in given], [n for n in given if n not in own]
    return LoadReport(fitting, missing, unexpected, mismatched)


def describe(weights: Mapping[str, Tensor]) -> str:
    """A few words on the model that has these entries."""
    blocks = {name.split(".")[3] for name in weights if name.startswith("backbone.stages.2.")}
    wide = any(name.startswith("backbone.stages.2.0.conv3.") for name in weights)
    head = weights.get("decoder.score_heads.0.weight")
    if not blocks or head is None:
        return f"something else than RT-DETRv3 (first name {next(iter(weights), 'none')})"
    depth = {(2, False): "R18", (6, False): "R34", (6, True): "R50", (23, True): "R101"}.get((len(blocks), wide), "R?")
    layers = len({name.split(".")[2] for name in weights if name.startswith("decoder.score_heads.")})
    stem = weights["backbone.stem.0.conv.weight"].shape[0] if "backbone.stem.0.conv.weight" in weights else 0
    width = "" if stem == 32 else f" with a stem of {stem} channels"
    return f"RT-DETRv3 {depth}{width}, {layers} decoder layers of width {head.shape[1]}, {head.shape[0]} classes"
