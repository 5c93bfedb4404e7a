"""Silences the converters of other projects."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager without the converters' messages for their own developers, and without gradients."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    sink = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
            torch.no_grad(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
