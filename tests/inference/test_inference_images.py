"""Batches of images on their way to the network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from api_cases import PIXELS

from rtdetr import RTDETRv3
from rtdetr.inference.images import DeviceTensors, HostPixels
from rtdetr.inference.predictor import Predictor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FITTING = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)  # as the network takes it
READ_ONLY = FITTING.copy()
READ_ONLY.setflags(write=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("array", "fits"),
    [(FITTING, True), (READ_ONLY, False), (FITTING[:, ::-1], False), (PIXELS, False)],
    ids=["fitting", "read-only", "mirrored", "other"],
)
def test_an_array_that_fits_is_taken_from_where_it_lies(
    checkpoint: Path, device: str, array: np.ndarray, fits: bool
) -> None:
    """All others are copied on the host, as `resize="host"` does with every array."""
    model = RTDETRv3.from_pretrained(checkpoint, device=device, half=False)
    assert model.model is not None
    plain = Predictor.of(model.model, model.cfg, model.classes, model.device, half=False, resize="host")
    ours, theirs = model._predictors.get()._batch_of([array]), plain._batch_of([array])
    assert isinstance(ours, DeviceTensors) == fits and isinstance(theirs, HostPixels)
    pixels, copied = (each.on(model.device) for each in (ours, theirs))
    assert torch.equal(pixels, copied) and pixels.stride() == copied.stride() and torch.equal(ours.sizes, theirs.sizes)
    found, (expected,) = model.predict(array, threshold=0), plain.find([array], 0.0)
    np.testing.assert_allclose(found.scores[:5], expected.scores[:5], atol=0 if device == "cpu" else 2e-3)
    if device == "cpu":
        assert np.shares_memory(pixels.numpy(), array) == fits
        np.testing.assert_array_equal(found.boxes, expected.boxes)
