"""Errors in the threads of a kernel reach Python: none ends the process, and no thread waits for one that failed."""

import subprocess

import pytest
from processes import run_code

from monoblock.kernels.cpu import library

TIMEOUT = 600  # seconds, so that a deadlock fails

# So many tokens that scratch for all of them cannot be allocated with the address space that is left.
MANY_TOKENS = """
import resource
import sys
import torch
import operator_cases
from operator_cases import D, G, H, K, V, describe, draw, native_stack, paged_pass

assert operator_cases.load_kernels().is_ready
operator_cases.F = 2048  # enough weights for several threads
torch.set_num_threads(int(sys.argv[1]))
N = 1 << 17
large = paged_pass() | {
    "x": draw(4, N, D),
    "counts": torch.tensor([N, 0, 0, 0]),
    "lengths": torch.zeros(4, dtype=torch.long),
    "tables": torch.arange(N // 16, dtype=torch.int32).repeat(4, 1),
    "keys": [draw(N // 16, G, 16, K)] * 2,
    "values": [draw(N // 16, G, 16, V)] * 2,
    "positions": None,
    "rotary_cos": [draw(N, K // 2)],
    "rotary_sin": [draw(N, K // 2)],
    "position_biases": [draw(H, N)],
}
alone = native_stack().run(**paged_pass())
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
for _ in range(3):
    print(describe(lambda: native_stack().run(**large)))
assert torch.equal(native_stack().run(**paged_pass()), alone)
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
    done = run_code(MANY_TOKENS, threads, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-500:]
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()] == ["std::bad_alloc"] * 3


def test_threads_do_not_wait_for_one_that_failed(tmp_path):
    source, program = tmp_path / "one_failing_thread.cpp", tmp_path / "one_failing_thread"
    source.write_text(ONE_FAILING_THREAD, encoding="utf-8")
    command = [library.find_compiler(), "-std=c++20", "-pthread", f"-I{library.SOURCE_FOLDER}", str(source)]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=TIMEOUT)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0
    assert done.stdout.split() == ["std::bad_alloc"] * 4
