"""Fixtures of all tests."""

import functools
from pathlib import Path

import pytest
import torch

from monoblock.data.corpora import bible

# Folders of tests that take long; the others, which are short, then fill the time until both workers are done.
FIRST_FOLDERS = ("parallel", "kill", "training", "experiments", "interop", "kernels", "accounting", "course", "runs")


def pytest_collection_modifyitems(items):
    order = {name: index for index, name in enumerate(FIRST_FOLDERS)}
    items.sort(key=lambda item: order.get(Path(item.path).parent.name, len(order)))


@pytest.fixture(autouse=True, scope="session")
def clean_verses_once():
    """Clean each verse of the packaged Bibles, which many tests read, only once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bible, "clean_verse", functools.cache(bible.clean_verse))
        yield


@pytest.fixture(autouse=True)
def restore_onednn():
    """Undo what torch does on ARM processors without bfloat16: the first such product switches oneDNN off for good."""
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before
