from __future__ import annotations

import pytest
from ops_cases import BACKENDS, Target, require


@pytest.fixture(params=BACKENDS)
def target(request: pytest.FixtureRequest) -> Target:
    require(*request.param)
    return request.param
