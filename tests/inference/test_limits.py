"""How many sequences are decoded at the same time: on a GPU, as many as fit into its free memory."""

import pytest
import torch

from monoblock.config.families import gpt
from monoblock.inference import pages
from monoblock.inference.pages import default_max_rows, row_bytes
from monoblock.model import Transformer

CAPACITY = 32


@pytest.fixture
def model():
    return Transformer(gpt(vocab=100, width=16, depth=2, heads=2, context=CAPACITY))


def test_the_bytes_of_a_row_are_those_of_its_cache_and_of_three_copies_of_its_logits(model):
    assert row_bytes(model, CAPACITY) == 4 * 2 * 2 * 16 * CAPACITY + 3 * 4 * 100


@pytest.mark.parametrize(("rows", "expected"), [(0, 1), (70, 70), (pages.MAX_GPU_ROWS + 1, pages.MAX_GPU_ROWS)])
def test_a_gpu_decodes_as_many_rows_as_fit_into_its_free_memory(model, monkeypatch, rows, expected):
    free = int((rows + 0.5) * row_bytes(model, CAPACITY) / pages.MEMORY_SHARE)
    monkeypatch.setattr(Transformer, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10 * free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert default_max_rows(model, CAPACITY) == expected


def test_a_cpu_decodes_a_fixed_number_of_rows(model):
    assert default_max_rows(model, CAPACITY) == pages.CPU_ROWS
