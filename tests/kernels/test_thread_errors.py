"""Errors in the threads of a kernel reach Python: none ends the process, and no thread waits for one that failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import monoblock as mb
from monoblock.kernels.cpu import library

TIMEOUT = 600  # seconds, so that a deadlock fails

# So many columns, all of them one in memory, that scratch for one number a column cannot be allocated.
LARGE_SOURCES = """
import sys
import torch
import operator_cases
from operator_cases import G, H, K, V, describe, draw, native_stack, step

assert operator_cases.load_kernels().is_ready
operator_cases.F = 2048  # enough weights for several threads
torch.set_num_threads(int(sys.argv[1]))
keys, values = draw(2, G, 1, K).expand(2, G, 2**45, K), draw(2, G, 1, V).expand(2, G, 2**45, V)
large = {"source_keys": [keys] * 2, "source_values": [values] * 2, "source_mask": None}
alone = native_stack().step(**step())
for _ in range(3):
    print(describe(lambda: native_stack().step(**step() | large)))
    print(describe(lambda: torch.ops.monoblock.attend_one_query(draw(6, H, 1, K), keys, values, None, 0.3)))
assert torch.equal(native_stack().step(**step()), alone)
"""

# Thread `failing` of four throws in round `failing`; the others must end, and its error must be the one that is kept.
ONE_FAILING_THREAD = """
#include <cstdio>
#include <new>
#include <thread>
#include <vector>
#include "threads.h"

int main() {
  for (int failing = 0; failing < 4; ++failing) {
    Barrier barrier(4);
    ThreadErrors errors;
    std::vector<std::thread> threads;
    for (int n = 0; n < 4; ++n)
      threads.emplace_back([&, n] {
        errors.run(
            [&] {
              for (int round = 0; round < 9; ++round) {
                if (n == failing && round == failing) throw std::bad_alloc();
                barrier.wait();
              }
            },
            [&] { barrier.abandon(); });
      });
    for (std::thread& thread : threads) thread.join();
    try {
      errors.rethrow();
      std::puts("no error");
    } catch (const std::exception& error) {
      std::puts(error.what());
    }
  }
}
"""


@pytest.fixture(autouse=True)
def compiled():
    if not library.load_kernels().is_ready:
        pytest.skip(library.load_kernels().reason)


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_cannot_be_allocated_is_an_error_of_python(threads):
    folders = [str(Path(__file__).parents[1]), str(Path(mb.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", LARGE_SOURCES, str(threads)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()] == ["std::bad_alloc"] * 6


def test_threads_do_not_wait_for_one_that_failed(tmp_path):
    source, program = tmp_path / "one_failing_thread.cpp", tmp_path / "one_failing_thread"
    source.write_text(ONE_FAILING_THREAD, encoding="utf-8")
    command = [library.find_compiler(), "-std=c++20", "-pthread", f"-I{library.SOURCE_FOLDER}", str(source)]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=TIMEOUT)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0
    assert done.stdout.split() == ["std::bad_alloc"] * 4
