"""Fixtures of the decoding tests."""

import pytest
from operator_support import use_kernels_for_toys


@pytest.fixture(params=["plain", "kernels"])
def kernels(request, monkeypatch):
    """Run small models with torch alone, then with the CPU kernels that larger models use."""
    if request.param == "kernels":
        use_kernels_for_toys(monkeypatch)
    return request.param
