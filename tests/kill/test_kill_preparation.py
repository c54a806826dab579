"""`data prepare` killed with SIGKILL at any moment and run again writes the bytes of an uninterrupted run."""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import monoblock
from monoblock.tokenizers.tokenizer import Tokenizer

SOURCE = Path(monoblock.__file__).parent.parent
# As the command line, but with small parts, which are recorded at once.
SCRIPT = """
import sys
from monoblock.data import prepare
from monoblock.tokenizers.tokenizer import Tokenizer
if __name__ == "__main__":
    prepare.SYNC_SECONDS = 0.0
    text, tokenizer, out, jobs = sys.argv[1:]
    plan = prepare.TokenizerPlan(Tokenizer.from_pretrained(tokenizer))
    options = {"validation": 0.05, "shard_tokens": 30_000, "part_bytes": 20_000, "jobs": int(jobs)}
    prepare.prepare_tokens([text], out, tokenizer=plan, **options)
"""


def launch(folder, out, jobs):
    arguments = [folder / "script.py", folder / "text.txt", folder / "tokenizer", out, jobs]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)], env=environment, stderr=log, start_new_session=True
        )


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def written(out):
    """The bytes in a folder to which another process writes, and from which it removes what was not recorded."""
    total = 0
    for path in out.glob("*.bin"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def group_is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_preparation_goes_on_and_gives_the_same_bytes(tmp_path, jobs):
    rng = random.Random(jobs)
    words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randrange(1, 9))) for _ in range(3000)]
    text = " ".join(rng.choice(words) for _ in range(400_000))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "script.py").write_text(SCRIPT)
    Tokenizer.train("bpe", [text[:100_000]], 500).save_pretrained(tmp_path / "tokenizer")
    assert launch(tmp_path, tmp_path / "whole", 1).wait(240) == 0
    size, out, kills = written(tmp_path / "whole"), tmp_path / "killed", 0
    for share in sorted(rng.random() * 0.9 for _ in range(4)):
        process = launch(tmp_path, out, jobs)
        while process.poll() is None and written(out) < share * size:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)  # the main process only; its workers end by themselves
        kills += process.wait(600) == -signal.SIGKILL
        deadline = time.monotonic() + 300
        while group_is_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not group_is_alive(process.pid), "a worker outlived the main process"
    process = launch(tmp_path, out, jobs)
    assert process.wait(240) == 0, (tmp_path / "log").read_text()
    assert kills >= 3
    assert digests(out) == digests(tmp_path / "whole")
