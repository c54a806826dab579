"""The operator of a decoding step: fewer threads than requested, several threads of Python."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from operator_cases import native_stack, paged_pass
from operator_support import use_kernels_for_toys
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
    assert mb.optimize(model).model.decoder.cpu_stack is not None
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


# -- threads of Python ------------------------------------------------------------------------------------------------


def test_python_threads_that_share_a_stack_take_the_steps_of_one_alone():
    stack = native_stack()
    alone = stack.run(**paged_pass())
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: stack.run(**paged_pass()), range(40)))
    assert all(torch.equal(result, alone) for result in results)
