"""Compares the entries of a weight file and of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from rtdetr.wording import counted

SHOWN_NAMES = 6  # of each kind, in messages


class LoadReport(NamedTuple):
    """The result of loading a weight file, entry by entry."""

    matched: list[str]
    missing: list[str]  # in the model only
    unexpected: list[str]  # in the file only
    mismatched: list[str]  # in both, with different shapes: "name (file's shape, model's shape)"
    partial: Sequence[str] = ()  # class heads with some rows, or all, not from the file
    classes: str = ""  # one line on how the classes were transferred

    def text(self, shown: int = SHOWN_NAMES) -> str:
        """Several lines: share of the model that was loaded, then up to `shown` names of each kind that was not."""
        total = len(self.matched) + len(self.partial) + len(self.missing) + len(self.mismatched)
        lines = [
            f"loaded {len(self.matched)} of {total} entries of the model ({len(self.matched) / max(total, 1):.1%})"
        ]
        kinds: tuple[tuple[str, Sequence[str]], ...] = (
            ("heads with rows for each class, loaded in part", self.partial),
            ("missing in the file, kept as they were", self.missing),
            ("of another shape, kept as they were", self.mismatched),
            ("left over in the file", self.unexpected),
        )
        lines += [f"  {len(names)} {kind}: {listed(names, shown)}" for kind, names in kinds if names]
        return "\n".join(lines + ([f"  classes: {self.classes}"] if self.classes else []))

    def differing(self) -> list[str]:
        """The entries by which file and model differ, each with the reason."""
        missing, left_over = [f"{n} missing" for n in self.missing], [f"{n} left over" for n in self.unexpected]
        return self.mismatched + missing + left_over


def listed(names: Sequence[str], shown: int = SHOWN_NAMES) -> str:
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(names[:shown])}{more}"


def compare(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> LoadReport:
    """Matches `weights` with the entries of a model by name and shape; `num_batches_tracked` is ignored."""
    own = {name: tensor for name, tensor in own.items() if not name.endswith("num_batches_tracked")}
    given = {name: tensor for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    shapes = {name: (tuple(given[name].shape), tuple(own[name].shape)) for name in own if name in given}
    fitting = [name for name, (theirs, ours) in shapes.items() if theirs == ours]
    mismatched = [f"{name} ({theirs}, {ours})" for name, (theirs, ours) in shapes.items() if theirs != ours]
    missing, unexpected = [n for n in own if n not in given], [n for n in given if n not in own]
    return LoadReport(fitting, missing, unexpected, mismatched)


def describe(weights: Mapping[str, Tensor]) -> str:
    """A short description of the model with these entries; models of other depths or widths get another one."""
    blocks = {name.split(".")[3] for name in weights if name.startswith("backbone.stages.2.")}
    wide = any(name.startswith("backbone.stages.2.0.conv3.") for name in weights)
    if not blocks or "decoder.score_heads.0.weight" not in weights:
        return f"something else than RT-DETRv3 (first name {next(iter(weights), 'none')})"
    depth = {(2, False): "R18", (6, False): "R34", (6, True): "R50", (23, True): "R101"}.get((len(blocks), wide), "R?")

    def rows(name: str) -> int:
        return weights[name].shape[0] if name in weights and weights[name].dim() else 0

    def count(start: str) -> int:
        return len({name.split(".")[start.count(".")] for name in weights if name.startswith(start)})

    return (
        f"RT-DETRv3 {depth} with a stem of {rows('backbone.stem.0.conv.weight')} channels, "
        f"encoder of width {rows('encoder.aifi.norm1.weight')} ({rows('encoder.aifi.linear1.weight')} inside), "
        f"{counted(count('decoder.score_heads.'), 'decoder layer')} of width {rows('decoder.layers.0.norm1.weight')} "
        f"({rows('decoder.layers.0.linear1.weight')} inside) on {count('decoder.input_proj.')} levels, "
        f"{counted(count('query_groups.selectors.'), 'extra query group')}, "
        f"{counted(rows('decoder.score_heads.0.weight'), 'class')}"
    )
