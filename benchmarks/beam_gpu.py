"""Beam search with 5 beams on one GPU: correctness, translation beside transformers, and the evaluation of Dakshina.

    python benchmarks/beam_gpu.py --write                                  # random weights
    python benchmarks/beam_gpu.py --run runs/multi30k --data DIR --dakshina-run runs/dakshina-hi --write
    python benchmarks/beam_gpu.py --only checks
    python benchmarks/beam_gpu.py --only profile

1. The kernels against fp64; tiny models of the encoder-decoder presets and of some decoders: texts and scores of
   recorded searches are those of the plain model in fp32.
2. 1,000 sources with the model of the recipe multi30k, from token ids to token ids. transformers runs the same weights
   in its M2M100 class (Marian with pre-norm). Random sources have the lengths of Multi30k, and every target has --new
   tokens; with --run, the sources are test 2016 and targets end as the model says. Both are timed with several batch
   sizes, sorted by length, after a run to warm up (which records CUDA graphs); our fastest run counts, beside every
   batch size of transformers.
3. Seconds of an evaluation of Dakshina: the whole of `mb.evaluate` with --dakshina-run, otherwise 4,500 random words
   of 3 to 14 characters with random weights of the model of the recipe, and 40 tokens for each.

4. With --only profile: milliseconds of a recorded step, and its kernels.

--smoke checks correctness and runs the rest with a few sources, without a GPU on the CPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _report import source, write_section
from torch.profiler import ProfilerActivity, profile
from translate_real import to_transformers

import monoblock as mb
from monoblock.bench.translation import TokenRows, pad_rows, random_sources
from monoblock.inference import prepared_model
from monoblock.inference.engine import Engine
from monoblock.inference.pages import default_max_rows
from monoblock.inference.settings import Settings
from monoblock.kernels.gpu_beams import attend_beams, attend_source, best_tokens
from monoblock.nn.attention import attend
from monoblock.runs.evaluate import evaluate
from monoblock.runs.load import load
from monoblock.runs.recipe import read_toml

RESULTS = Path(__file__).with_name("results") / "beam-h200.md"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BEAMS, EOS, PAD, START = 5, 0, 1, 2
DECODERS = ("gpt2", "llama-7b", "mistral-7b", "bloom-560m", "gemma2-2b")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Found = dict[int, list[tuple[tuple[int, ...], float]]]


# -- correctness ------------------------------------------------------------------------------------------------------


def search(engine: Engine, prompts: TokenRows, settings: Settings, start: int = START) -> Found:
    """Return (tokens, score) of each returned sequence, by the index of its prompt."""
    has_encoder = engine.model.config.encoder is not None
    index_by_request = {}
    for index, prompt in enumerate(prompts):
        request = engine.add([start], settings, source=prompt) if has_encoder else engine.add(prompt, settings)
        index_by_request[request] = index
    found: Found = {index: [] for index in range(len(prompts))}
    while engine.busy:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            found[index_by_request[output.request_id]].append((output.tokens, output.score or 0.0))
    return found


def check_kernels() -> None:
    """Compare each kernel with the plain formula in fp64."""
    if DEVICE != "cuda":
        return
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        for S, H, G, n, K, length in ((64, 4, 4, 5, 64, 31), (3, 8, 2, 4, 128, 200), (2, 2, 1, 3, 16, 1)):
            make = lambda *shape, dtype=dtype: torch.randn(*shape, device="cuda").to(dtype)
            q, k, v = (make(S, n, heads * K).unflatten(-1, (heads, K)).transpose(1, 2) for heads in (H, G, G))
            keys, values = make(S, G, (length + 1) * n + 1, K), make(S, G, (length + 1) * n + 1, K)
            lengths = torch.randint(0, length + 1, (S,), device="cuda")
            writers = torch.randint(0, n, (S, n, length + 1), dtype=torch.uint8, device="cuda")
            position, beam = torch.arange(length + 1, device="cuda"), torch.arange(n, device="cuda")
            writers[position.expand_as(writers) > lengths[:, None, None]] = n
            writers.scatter_(2, lengths[:, None, None].expand(S, n, 1), beam[None, :, None].expand(S, n, 1).byte())
            out = attend_beams(q, k, v, keys, values, writers, lengths, scale=None)
            visible = (writers[..., None] == beam).flatten(2)[:, None]
            slots = visible.shape[-1]
            check_attention("beams", out, (q, keys[:, :, :slots], values[:, :, :slots], visible), tolerance)
            valid = torch.rand(S, slots, device="cuda") < 0.8
            valid[:, 0] = True
            out = attend_source(q, keys[:, :, :slots], values[:, :, :slots], valid, scale=None)
            visible = valid[:, None, None].expand(S, 1, n, slots)
            check_attention("source", out, (q, keys[:, :, :slots], values[:, :, :slots], visible), tolerance)
        logits = 4 * torch.randn(40, BEAMS, 8007, device="cuda").to(dtype)
        scores = -9 * torch.rand(40, BEAMS, device="cuda", dtype=torch.double)
        totals = (logits.double().log_softmax(-1) + scores[..., None]).flatten(1)
        found, beams, tokens = best_tokens(logits, scores, 2 * BEAMS)
        assert (found - totals.topk(2 * BEAMS).values).abs().max() < 1e-4
        assert (found - totals.gather(1, beams * 8007 + tokens)).abs().max() < 1e-4
    print("ok kernels", flush=True)


def check_attention(name: str, out: torch.Tensor, inputs: tuple[torch.Tensor, ...], tolerance: float) -> None:
    q, keys, values, visible = inputs
    expected = attend(q.double(), keys.double(), values.double(), visible).transpose(1, 2).flatten(2)
    error = float((out.double() - expected).abs().max() / expected.abs().max())
    assert error < tolerance, f"{name}, {q.dtype}: relative error {error:.1e}"


def check_presets() -> list[str]:
    """Compare recorded searches with those of the plain model; return the names of the presets that agree."""
    names = [name for name in sorted(mb.PRESETS) if mb.PRESETS[name].config.family == "encoder-decoder"]
    rng, checked = random.Random(3), []
    for name in (*names, *DECODERS):
        torch.manual_seed(1)
        config = mb.tiny(name)
        heads = next(config.decoder.layers()).attention.heads
        config = mb.vary(config, width=16 * heads)  # the kernels have no heads of 12 features
        model = mb.Transformer(config).to(DEVICE).eval()
        vocab, optimized = model.config.target_input.vocab, mb.optimize(model)
        for changes in (
            {},
            {"early_stopping": True, "length_penalty": 0.5, "eos_token_id": (2, 7, 19, 23)},
            {"early_stopping": "never", "min_new_tokens": 3, "suppress_tokens": (5,)},
        ):
            options = {"max_new_tokens": 21, "num_beams": BEAMS, "num_return_sequences": 3, "eos_token_id": (2, 7)}
            settings = Settings(**{**options, **changes})
            for count in (1, 7, 12, 11):  # the last batch reuses the buffers of the one before
                prompts = [[rng.randrange(3, vocab) for _ in range(1 + rng.randrange(9))] for _ in range(count)]
                fast, plain = (
                    search(Engine(each, capacity=40, max_rows=1000), prompts, settings) for each in (optimized, model)
                )
                compare(name, changes, fast, plain)
        assert optimized._idle_pages[0].searches.idle, f"{name}: no search was recorded"
        checked.append(name)
        print("ok", name, flush=True)
    return checked


def compare(name: str, changes: dict[str, Any], fast: Found, plain: Found) -> None:
    """Fail if a score differs, or a text whose score is not that of another text."""
    for index, expected in plain.items():
        for rank, ((tokens, score), (other, other_score)) in enumerate(zip(fast[index], expected, strict=True)):
            where = f"{name} {changes}, prompt {index}, hypothesis {rank}"
            close = abs(score - other_score) <= 1e-4 * max(1.0, abs(other_score))
            assert close, f"{where}: score {score} instead of {other_score}"
            assert tokens == other or abs(score - other_score) < 1e-6, f"{where}: {tokens} instead of {other}"


# -- translation ------------------------------------------------------------------------------------------------------


def random_pipe(recipe: str, vocab: int) -> Any:
    """Return an untrained model of a recipe, as far as a pipeline is needed here."""
    knobs = {key: value for key, value in read_toml(recipe)["model"].items() if key not in ("family", "dropout")}
    torch.manual_seed(1)
    model = mb.Transformer(mb.vaswani(vocab=vocab, **{"hidden": 4 * knobs["width"], **knobs})).to(DEVICE).eval()
    tokenizer = SimpleNamespace(eos_id=EOS, pad_id=PAD)
    return SimpleNamespace(model=model, tokenizer=tokenizer, defaults=SimpleNamespace(decoder_start_token_id=START))


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def fastest(run: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Return the seconds of the fastest round, after one to warm up, and its result."""
    run()
    seconds, result = float("inf"), None
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        result = run()
        synchronize()
        seconds = min(seconds, time.perf_counter() - start)
    return seconds, result


def by_length(rows: TokenRows) -> TokenRows:
    return sorted(rows, key=len, reverse=True)


def run_monoblock(
    model: mb.OptimizedModel, rows: TokenRows, settings: Settings, start: int, max_rows: int
) -> TokenRows:
    engine = Engine(model, max_rows=max_rows, capacity=1 + settings.max_new_tokens)
    found = search(engine, rows, settings, start)
    return [list(found[index][0][0]) for index in range(len(rows))]


@torch.inference_mode()
def run_transformers(model: Any, rows: TokenRows, settings: Settings, pad: int, batch: int) -> TokenRows:
    targets: TokenRows = []
    eos = list(settings.eos_token_id) or None
    model.generation_config.eos_token_id = model.config.eos_token_id = eos
    options = {"num_beams": settings.num_beams, "max_new_tokens": settings.max_new_tokens, "do_sample": False}
    for first in range(0, len(rows), batch):
        ids = pad_rows(rows, list(range(first, min(first + batch, len(rows)))), pad).to(DEVICE)
        targets += model.generate(ids, attention_mask=(ids != pad).long(), **options)[:, 1:].tolist()
    return targets


def same_targets(ours: TokenRows, theirs: TokenRows, special: set[int]) -> int:
    def strip(row: list[int]) -> list[int]:
        return [token for token in row if token not in special]

    return sum(strip(a) == strip(b) for a, b in zip(ours, theirs, strict=True))


def measure_translation(args: argparse.Namespace) -> list[str]:
    pipe = random_pipe("multi30k", args.vocab) if args.run is None else load(args.run, device=DEVICE)
    settings = Settings(max_new_tokens=args.new, num_beams=BEAMS)
    rows = by_length(random_sources(args.count, args.vocab))
    what = f"random weights, {args.new} tokens each"
    if args.run is not None:
        lines = (Path(args.data) / "multi30k" / "test_2016_flickr.de").read_text(encoding="utf-8").splitlines()
        rows = by_length([list(pipe.encode_prompt(line).source or ()) for line in lines[: args.count]])
        settings = Settings(max_new_tokens=100, num_beams=BEAMS, eos_token_id=(pipe.tokenizer.eos_id,))
        what = "trained weights, Multi30k test 2016"
    pipe.model.cpu()
    theirs = to_transformers(pipe)
    table = [
        f"{len(rows):,} sources, {BEAMS} beams, {what}",
        "",
        "| dtype | monoblock, sentences/s | rows | transformers, sentences/s | batch | ratio | same targets |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in args.dtypes:
        table += (lines := measure_dtype(name, pipe, theirs, rows, settings, args))
        print(*lines, sep="\n", flush=True)
    return table


def measure_dtype(
    name: str, pipe: Any, theirs: Any, rows: TokenRows, settings: Settings, args: argparse.Namespace
) -> list[str]:
    """Return the rows of the table for one dtype: our fastest run beside every batch size of transformers."""
    model, theirs = pipe.model.to(DEVICE, DTYPES[name]), theirs.to(DEVICE, DTYPES[name])
    for module in (theirs.model.encoder, theirs.model.decoder):
        module.embed_positions.weight = module.embed_positions.weight.to(DEVICE, DTYPES[name])
    start, pad = pipe.defaults.decoder_start_token_id, pipe.tokenizer.pad_id

    fast = mb.optimize(model)

    def ours_with(size: int) -> Callable[[], TokenRows]:
        return lambda: run_monoblock(fast, rows, settings, start, size)

    def theirs_with(batch: int) -> Callable[[], TokenRows]:
        return lambda: run_transformers(theirs, rows, settings, pad, batch)

    mine, peers = {}, {}
    for size in args.rows or sorted({2560, 5120, default_max_rows(model, 1 + settings.max_new_tokens)}):
        mine[size] = fastest(ours_with(size), args.rounds)
        print(f"{name}: monoblock, {size} rows: {len(rows) / mine[size][0]:,.0f} sentences/s", flush=True)
    fast.close()
    for batch in args.batches:
        try:
            peers[batch] = fastest(theirs_with(batch), 1 if batch < 256 else 2)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        print(f"{name}: transformers, batch {batch}: {len(rows) / peers[batch][0]:,.0f} sentences/s", flush=True)
    size = min(mine, key=lambda key: mine[key][0])
    seconds, targets = mine[size]
    lines = []
    for batch, (peer_seconds, peer_targets) in peers.items():
        same = same_targets(targets, peer_targets, {start, pad, pipe.tokenizer.eos_id})
        rates = f"{len(rows) / seconds:,.0f} | {size:,} | {len(rows) / peer_seconds:,.0f} | {batch:,}"
        lines.append(f"| {name} | {rates} | {peer_seconds / seconds:.1f} | {100 * same / len(rows):.1f} % |")
    return lines


# -- Dakshina ---------------------------------------------------------------------------------------------------------


def measure_dakshina(args: argparse.Namespace) -> list[str]:
    if args.dakshina_run is not None:
        pipe = load(args.dakshina_run, device=DEVICE)
        times = []
        for _ in range(2):
            start = time.perf_counter()
            result = evaluate(pipe, "dakshina-hi", folder=args.data)
            times.append(time.perf_counter() - start)
        sources = result.metrics["sources"]
        what = f"`mb.evaluate` of a trained model, {sources:,} words, accuracy {result.metrics['accuracy']:.4f}"
    else:
        rng, pipe = random.Random(1), random_pipe("dakshina-hi", 256)
        words = by_length([[rng.randrange(3, 256) for _ in range(rng.randint(3, 14))] for _ in range(args.words)])
        settings = Settings(max_new_tokens=40, num_beams=BEAMS, num_return_sequences=BEAMS)
        times, fast = [], mb.optimize(pipe.model)
        for _ in range(2):
            start = time.perf_counter()
            run_monoblock(fast, words, settings, START, default_max_rows(pipe.model, 41))
            synchronize()
            times.append(time.perf_counter() - start)
        what = f"random weights, {len(words):,} words, 40 tokens each"
    return [f"Dakshina: {what}, {BEAMS} beams, fp32: {times[0]:.2f} s, and {times[1]:.2f} s in a second call."]


# -- profile ----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def profile_step(args: argparse.Namespace) -> None:
    """Print the milliseconds of each recorded pass, and the kernels of the last one."""
    pipe = random_pipe("multi30k", args.vocab)
    rows = by_length(random_sources(args.count, args.vocab))
    settings = Settings(max_new_tokens=args.new, num_beams=BEAMS)
    for name in args.dtypes:
        model = mb.optimize(pipe.model.to(DEVICE, DTYPES[name]))
        seconds, _ = fastest(lambda model=model: run_monoblock(model, rows, settings, START, 2560), args.rounds)
        print(f"{name}: {len(rows) / seconds:,.0f} sentences/s, {1000 * seconds:.1f} ms")
        buffers = model._idle_pages[0].searches.idle[-1]
        for visible, replay in buffers.replays.items():
            replay_seconds, _ = fastest(lambda replay=replay: [replay() for _ in range(20)], 3)
            print(f"{name}, {visible} positions: {50 * replay_seconds:.3f} ms a step")
        if DEVICE != "cuda":
            continue
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            replay()
            synchronize()
        for kernel in sorted(profiler.key_averages(), key=lambda kernel: -kernel.device_time_total)[:24]:
            print(f"{kernel.device_time_total:9.1f} us  {kernel.count:4d} ×  {kernel.key[:100]}")
        model.close()


# -- report -----------------------------------------------------------------------------------------------------------


def provenance() -> str:
    return f"{source()}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("checks", "translation", "dakshina", "profile"))
    parser.add_argument("--run", help="a run folder of the recipe multi30k")
    parser.add_argument("--dakshina-run", help="a run folder of the recipe dakshina-hi")
    parser.add_argument("--data", type=Path, help="folder with corpora")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--words", type=int, default=4500, help="of Dakshina, with random weights")
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--new", type=int, default=24, help="tokens of a target, with random weights")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of monoblock; by default 2560 and 5120")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256, 1000], help="of transformers")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write the tables to results/{RESULTS.name}")
    parser.add_argument("--smoke", action="store_true", help="check correctness, and run the rest with a few sources")
    args = parser.parse_args()
    if args.run is not None and args.data is None:
        parser.error("--run needs --data with multi30k/test_2016_flickr.de")
    parts = args.only or ("checks", "translation", "dakshina")
    if DEVICE != "cuda":
        prepared_model.supports_cuda_graph = lambda model: True  # replaying a recorded step then runs it again
    if DEVICE != "cuda" and not args.smoke:
        parser.error("there is no GPU; write --smoke to check correctness")
    if args.smoke:
        args.count, args.words, args.new, args.vocab, args.rounds, args.write = 6, 9, 4, 500, 1, False
        args.rows, args.batches = [20, 30], [4, 6]
    sections = {}
    if "profile" in parts:
        profile_step(args)
    if "checks" in parts:
        check_kernels()
        sections["Correctness"] = [f"Recorded searches are those of the plain model: {', '.join(check_presets())}."]
    if "translation" in parts:
        title = f"Translation, {'random' if args.run is None else 'trained'} weights"
        sections[title] = measure_translation(args)
    if "dakshina" in parts:
        sections["Dakshina"] = measure_dakshina(args)
    for title, lines in sections.items():
        section = "\n".join([title, "", provenance(), "", *lines])
        print(f"\n## {section}", flush=True)
        if args.write:
            write_section(RESULTS, "Beam search on one GPU", section)


if __name__ == "__main__":
    main()
