"""Fixtures of all tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def restore_onednn():
    """Undo what torch does on ARM processors without bfloat16: the first such product switches oneDNN off for good."""
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before
