"""`monoblock data prepare` on much generated text: speed, memory of all processes, and the bytes after interruptions.

The text is drawn from a vocabulary of made-up words with Zipf's law. The command is killed (SIGKILL) several times at
random moments and run again until it ends. An uninterrupted run over the first files must have written the same bytes:
all of its full token files are compared with those of the interrupted run. --smoke prepares 50 MB;
--write saves the table.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
from _report import device_name, write_section

RESULTS = Path(__file__).with_name("results") / "prepare-data.md"
WORDS = 400_000
LINE_WORDS = 120


def write_text(folder: Path, total: int, files: int) -> None:
    """Write `files` text files of about `total` bytes in all; files that are there already are kept."""
    generator = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz", dtype=np.uint8)
    lengths = np.clip(generator.poisson(5.5, WORDS), 1, 20)
    draws = np.minimum(generator.geometric(0.12, int(lengths.sum())) - 1, len(letters) - 1)
    spelled, ends = letters[draws].tobytes(), np.cumsum(lengths)
    words = np.array([spelled[end - size : end] for end, size in zip(ends, lengths, strict=True)], dtype=object)
    for number in range(files):
        path = folder / f"text-{number:03d}.txt"
        if not path.exists():
            _write_file(path, total // files, words, np.random.default_rng([1, number]))


def _write_file(path: Path, size: int, words: np.ndarray, generator: np.random.Generator) -> None:
    with open(path.with_suffix(".part"), "wb") as file:
        while file.tell() < size:
            ranks = np.minimum(generator.zipf(1.15, (2_000, LINE_WORDS)) - 1, WORDS - 1)
            file.write(b"".join(b" ".join(line) + b".\n" for line in words[ranks].tolist()))
    path.with_suffix(".part").rename(path)


@dataclass
class Measured:
    seconds: float = 0.0
    peak_bytes: int = 0
    kills: int = 0


def group_memory(group: int) -> int:
    """Return the memory of all processes of a group, with shared pages counted once (PSS)."""
    total = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                text = (entry / "smaps_rollup").read_text()
                total += 1024 * int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
        except (OSError, StopIteration):
            continue
    return total


def prepare(
    sources: list[Path], out: Path, tokenizer: Path | None, shard_tokens: int, kill_after: list[float]
) -> Measured:
    """Run the command until it ends; kill it once after each of these numbers of seconds."""
    command = [sys.executable, "-m", "monoblock", "data", "prepare", *map(str, sources), "--out", str(out)]
    command += ["--documents", "line", "--shard-tokens", str(shard_tokens)]
    command += ["--tokenizer", str(tokenizer)] if tokenizer else ["--vocab", "32768"]
    measured = Measured()
    while True:
        begin = time.perf_counter()
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            measured.peak_bytes = max(measured.peak_bytes, group_memory(process.pid))
            time.sleep(1.0)
            if kill_after and time.perf_counter() - begin > kill_after[0]:
                kill_after.pop(0)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                measured.kills += 1
                measured.seconds += time.perf_counter() - begin
                break
        else:
            measured.seconds += time.perf_counter() - begin
            if process.returncode:
                raise SystemExit(f"monoblock data prepare ended with exit code {process.returncode}")
            return measured


def compare(whole: Path, first: Path) -> tuple[int, int]:
    """Return how many full token files of `first` there are, and how many of them have the bytes of `whole`."""
    names = sorted(path.name for path in first.glob("train-0*.bin"))
    full = [name for name in names if (first / name).stat().st_size == (first / names[0]).stat().st_size]
    full = [name for name in full if (whole / name).exists()]
    return len(full), sum(_digest(whole / name) == _digest(first / name) for name in full)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--first", type=int, default=4, help="files of the uninterrupted run")
    parser.add_argument("--kills", type=float, nargs="*", default=[], metavar="SECONDS", help="kill after these times")
    parser.add_argument("--shard-tokens", type=int, default=2**27)
    parser.add_argument("--folder", type=Path, help="keep the text and the tokens here")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="prepare 50 MB")
    options = parser.parse_args()
    if options.smoke:
        options.gigabytes, options.shard_tokens = 0.05, 500_000
    folder = options.folder or Path(tempfile.mkdtemp(prefix="monoblock-prepare-"))
    (folder / "text").mkdir(parents=True, exist_ok=True)
    write_text(folder / "text", int(options.gigabytes * 1e9), options.files)
    sources = sorted((folder / "text").glob("*.txt"))
    size = sum(path.stat().st_size for path in sources)
    print(f"{size / 1e9:.2f} GB in {len(sources)} files", flush=True)
    generator = random.Random(0)
    kills = options.kills or [generator.uniform(5, 20) for _ in range(3)]
    measured = prepare(sources, folder / "tokens", None, options.shard_tokens, list(kills))
    print(f"{measured.seconds:.0f} s with {measured.kills} kills, {measured.peak_bytes / 2**20:.0f} MiB", flush=True)
    again = prepare(sources[: options.first], folder / "tokens-first", folder / "tokens", options.shard_tokens, [])
    full, equal = compare(folder / "tokens", folder / "tokens-first")
    print(f"{equal} of {full} token files equal", flush=True)
    section = f"""{size / 1e9:.1f} GB of text, {os.cpu_count()} cores

{device_name()}; {date.today()}; `python benchmarks/prepare_data.py --gigabytes {options.gigabytes:g} --write`

| | |
|---|---|
| text | {size / 1e9:.2f} GB in {len(sources)} files |
| seconds, the time of {measured.kills} killed attempts included | {measured.seconds:.0f} |
| MB of text per second | {size / 1e6 / measured.seconds:.1f} |
| peak memory of all processes together | {max(measured.peak_bytes, again.peak_bytes) / 2**20:.0f} MiB |
| token files equal to those of an uninterrupted run | {equal} of {full} |
"""
    if options.write:
        write_section(RESULTS, "Preparing text", section)
    if options.folder is None:
        shutil.rmtree(folder)
    if not full or full != equal:
        raise SystemExit("the interrupted run wrote other bytes")


if __name__ == "__main__":
    main()
