"""The operators of a beam search: fewer threads than requested, tensors of wrong shapes, reuse of buffers."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from operator_cases import beam_search, native_search_model, native_stack, prompt, step
from operator_support import search_operators, use_kernels_for_toys
from support import build_model

import monoblock as mb
from monoblock.inference import fast_modules
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings
from monoblock.kernels.cpu import library

SIZES = {"vocab": 37, "width": 24, "depth": 2, "heads": 3, "hidden": 29, "context": 23}
TIMEOUT = 600  # seconds, so that a deadlock fails


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    if not library.load_kernels().is_ready:
        pytest.skip(library.load_kernels().reason)
    use_kernels_for_toys(monkeypatch)


def translator():
    return build_model(mb.vaswani(**SIZES), seed=5)


def translate(model, **options):
    generator = torch.Generator().manual_seed(2)
    sources = [torch.randint(3, 37, (2 + n % 7,), generator=generator).tolist() for n in range(11)]
    engine, texts = Engine(model if options else mb.optimize(model), max_rows=1000, **options), {}
    settings = Settings(max_new_tokens=7, num_beams=4, eos_token_id=(2,))
    order = [engine.add((1,), settings, source) for source in sources]
    while engine.busy:
        texts |= {order.index(event.request_id): list(event.tokens) for event in engine.step()}
    return [texts[number] for number in range(11)]


def print_translations():
    """Print what the operator finds when it requests two threads, in a process that may have fewer."""
    torch.set_num_threads(2)
    fast_modules.MIN_NATIVE_WEIGHTS = 0
    model = translator()
    assert torch.get_num_threads() == 2
    assert search_operators(model) is not None
    print(json.dumps(translate(model)))


@pytest.mark.parametrize(
    "limits",
    [{"OMP_THREAD_LIMIT": "1"}, *(pytest.param(one, marks=pytest.mark.slow) for one in ({"OMP_DYNAMIC": "true"}, {}))],
)
def test_a_search_equals_the_plain_one_whatever_the_number_of_threads(limits):
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(mb.__file__).parents[1])]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", **limits, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", "import test_threads; test_threads.print_translations()"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == translate(translator().double(), use_cache=False)


def search_model(bias=None):
    model = mb.optimize(translator()).model
    return torch.classes.monoblock.SearchModel(
        stack=model.decoder.fused_stack.native_stack,
        output_table=model.output_embedding.detach(),
        table_scale=None,
        table_least=None,
        output_bias=bias,
        output_scale=1.0,
        token_table=None,
        token_scale=1.0,
    )


@pytest.mark.parametrize("bias", [torch.zeros(36), torch.zeros(37).double(), torch.zeros(74)[::2]])
def test_a_bias_that_does_not_fit_the_table_is_refused(bias):
    search_model(torch.zeros(37))
    with pytest.raises(RuntimeError, match="output_bias"):
        search_model(bias)


def search_for_three(prompts=3, key_sources=2, value_sources=2, heads=3, mask_rows=3):
    """A search for three prompts of two beams in five columns; the arguments describe its sources."""
    caches = [torch.zeros(6, 3, 5, 8) for _ in range(4)]
    keys, values = ([torch.zeros(prompts, heads, 7, 8)] * count for count in (key_sources, value_sources))
    return torch.classes.monoblock.BeamSearchBatch(
        model=search_model(),
        keys=caches[:2],
        values=caches[2:],
        source_keys=keys,
        source_values=values,
        source_mask=torch.ones(mask_rows, 7, dtype=torch.bool),
        lengths=torch.zeros(6, dtype=torch.long),
        position_table=None,
        beams=2,
        max_new_tokens=4,
        early_stopping="false",
        eos_tokens=[],
        length_penalty=1.0,
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": 2}, r"source_keys\[0\] has shape \(2, 3, 7, 8\); \(3, 3, any, 8\) is needed"),
        ({"heads": 2}, r"source_keys\[0\] has shape"),
        ({"key_sources": 1}, "source_keys has 1 elements; one for each block with cross-attention"),
        ({"value_sources": 1}, "source_values has 1 elements; one for each block with cross-attention"),
        ({"mask_rows": 2}, r"source_mask has shape \(2, 7\); \(3, 7\) is needed"),
    ],
)
def test_sources_that_do_not_fit_a_search_are_refused(wrong, message):
    search_for_three()
    with pytest.raises(RuntimeError, match=message):
        search_for_three(**wrong)


def test_cache_memory_is_used_again_unless_it_is_held_or_far_too_large():
    model = search_model()
    first = model.cache_memory(1009)
    second = model.cache_memory(1009)
    assert second.data_ptr() != first.data_ptr()
    del second
    assert model.cache_memory(601).numel() == 1009
    assert model.cache_memory(211).numel() == 211
    assert model.cache_memory(409).numel() == 409


# -- threads of Python ------------------------------------------------------------------------------------------------


def search_in_pooled_memory(model):
    """Run a beam search whose keys and values lie in the model's memory; return its finished hypotheses."""
    arguments = beam_search() | {"model": model}
    parts = model.cache_memory(4 * arguments["keys"][0].numel() + 4 * arguments["values"][0].numel()).zero_()
    for name in ("keys", "values"):
        shape, size = arguments[name][0].shape, arguments[name][0].numel()
        arguments[name] = [part.view(shape) for part in parts[: 2 * size].split(size)]
        parts = parts[2 * size :]
    search = torch.classes.monoblock.BeamSearchBatch(**arguments)
    for token in (5, 6):
        search.add(**prompt() | {"running": torch.tensor([[token], [token + 1]])})
    done = []
    while len(done) < 2:
        done += search.step(None, [3])
    return [search.hypotheses(number)[1][0] for number in range(2)]


def test_python_threads_that_share_a_model_find_what_one_alone_finds():
    model = native_search_model()
    alone = search_in_pooled_memory(model)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: search_in_pooled_memory(model), range(40)))
    assert results == [alone] * 40


def test_python_threads_that_share_a_stack_take_the_steps_of_one_alone():
    stack = native_stack()
    alone = stack.step(**step())
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: stack.step(**step()), range(40)))
    assert all(torch.equal(result, alone) for result in results)
