"""How far our numbers may lie from the official ones, and why: used by the parity tests, printed in the docs.

"Relative" is to the reference value for single numbers, and to the largest reference value for arrays, unless a line
says otherwise. The golden README measures how far the reference lies from itself under rounding noise; those figures
are quoted here as "reference noise".
"""

from __future__ import annotations

from typing import NamedTuple


class Tolerance(NamedTuple):
    value: float
    reason: str


# Double precision decides correctness: reference noise under a relative change of 1e-11 of the image is 5e-11.
FLOAT64: dict[str, Tolerance] = {
    "eval features": Tolerance(1e-8, "no discrete choice before them; measured 1e-10 on R18, deeper nets add more"),
    "eval selected cells": Tolerance(0, "a discrete choice; the gap at rank 300 is 5e-5, far above the noise"),
    "eval boxes": Tolerance(1e-8, "absolute, normalised; the figure the project asks for"),
    "eval logits": Tolerance(1e-7, "the figure the project asks for"),
    "eval detections": Tolerance(1e-7, "scores absolute, boxes relative to the image's longer side"),
    "train features": Tolerance(1e-8, "as in eval"),
    "train decoder input": Tolerance(1e-8, "reference boxes before the sigmoid, and content"),
    "train decoder output": Tolerance(1e-8, "three to six layers after a discrete choice that must agree"),
    "train discrete": Tolerance(0, "selected cells, matches (copies modulo boxes), assigned cells, masks"),
    "train total loss": Tolerance(1e-9, "the figure the project asks for; reference noise is 5e-11"),
    "train loss entries": Tolerance(1e-8, "the figure the project asks for"),
    "train assigned scores": Tolerance(1e-8, "IoU of predicted boxes"),
    "train gradient norms": Tolerance(1e-6, "relative, floor 1e-9 of the global norm; reference noise is 5e-9"),
    "train gradient samples": Tolerance(1e-6, "relative to the larger of the value and the tensor's root mean square"),
    "train batch norm state": Tolerance(1e-9, "mean and variance after one batch, variance times (n - 1) / n (O13)"),
}

# Single precision shows that rounding stays sane. Training feeds the stored selections and matches, because rounding
# alone changes some of them (reference noise: 20 of 300 ranks, 3e-4 of the total loss).
FLOAT32: dict[str, Tolerance] = {
    "eval features": Tolerance(5e-5, "reference noise 1.3e-6 of the maximum; measured 6e-6 on R18"),
    "eval selected cells": Tolerance(0, "the same 300 cells; their order may swap where scores nearly tie"),
    "eval boxes": Tolerance(1e-5, "the figure the project asks for; reference noise 2e-6"),
    "eval logits": Tolerance(5e-4, "absolute; the figure the project asks for; reference noise 1e-4"),
    "eval detections": Tolerance(5e-5, "reference noise 6e-6 in scores; boxes relative to the longer side"),
    "train features": Tolerance(1e-4, "batch statistics of 200 values at stride 32; measured 2e-5 on R18"),
    "train decoder input": Tolerance(3e-4, "boxes before the sigmoid; measured 3e-5 on R18"),
    "train decoder output": Tolerance(1e-3, "relative to the largest; measured 1e-4 on R18"),
    "train discrete": Tolerance(0, "given, except the assigner's cells, which react to rounding (see test)"),
    "train total loss": Tolerance(3e-5, "measured 9e-7 on R18 with the choices given; reference noise 3e-4 without"),
    "train loss entries": Tolerance(5e-4, "measured 2e-5 on R18 with the choices given; reference noise 8e-3 without"),
    "train assigned scores": Tolerance(1e-3, "IoU of predicted boxes to the sixth power (task-aligned)"),
    "train gradient norms": Tolerance(5e-2, "measured 4e-3 on R18 with choices given; reference noise 1e-1 without"),
    "train gradient samples": Tolerance(3e-1, "single elements of small gradients; measured 3e-2 on R18"),
    "train batch norm state": Tolerance(1e-5, "as the features"),
}

COMPONENTS: dict[str, Tolerance] = {
    "anchors": Tolerance(1e-6, "reference stored in float32"),
    "position codes": Tolerance(2e-6, "reference stored in float32"),
    "denoising": Tolerance(5e-6, "reference computed in float32: logits of clipped corners"),
    "varifocal": Tolerance(1e-12, "float64, a few terms"),
    "giou": Tolerance(1e-12, "float64, a few terms"),
    "postprocess": Tolerance(1e-4, "pixels; reference stored in float32"),
    "optimiser": Tolerance(1e-7, "the figure the project asks for"),
}
