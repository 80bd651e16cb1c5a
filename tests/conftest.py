"""Settings for all tests."""

import pytest
import torch
from hypothesis import settings

# Times depend on the machine; the same examples every time keep a failure repeatable.
settings.register_profile("tokenmerge", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("tokenmerge")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
