"""The quick cases of tests/install_matrix.py, and one that compiles; the whole matrix is for CI."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from install_matrix import Scratch, cannot_load, just_in_time, no_compiler, no_nvcc_but_demanded, run_case, torch_alone

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", [no_compiler, torch_alone, no_nvcc_but_demanded, cannot_load, just_in_time])
def test_install(case: Callable[[Scratch], None]) -> None:
    try:
        run_case(case)
    except LookupError as missing:
        pytest.skip(str(missing))
