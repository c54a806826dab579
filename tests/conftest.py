"""Fixtures of all tests."""

import functools
import gc
from pathlib import Path

import pytest

# Folders of tests that take long; the others, which are short, then fill the time until both workers are done.
FIRST_FOLDERS = ("parallel", "kill", "training", "experiments", "interop", "kernels", "accounting", "course", "runs")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import all tests without the garbage collector, which then never looks at what they have imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    order = {name: index for index, name in enumerate(FIRST_FOLDERS)}
    items.sort(key=lambda item: order.get(Path(item.path).parent.name, len(order)))


@pytest.fixture(autouse=True, scope="session")
def clean_verses_once():
    """Clean each verse of the packaged Bibles, which many tests read, only once."""
    from monoblock.data.corpora import bible  # not above, for the process that only gives out the tests

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bible, "clean_verse", functools.cache(bible.clean_verse))
        yield


@pytest.fixture(autouse=True)
def restore_onednn():
    """Undo what torch does on ARM processors without bfloat16: the first such product switches oneDNN off for good."""
    import torch

    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before
