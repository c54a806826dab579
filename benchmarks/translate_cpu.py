"""Translation on the CPU with beam 4, compared with transformers (Marian) and CTranslate2 on the same weights.

    python benchmarks/translate_cpu.py --threads 2 --write

A Marian model with random weights translates 1,000 sources of the lengths of Multi30k into targets of its average
length; no target ends earlier, so that all do the same work. Sources are sorted by length and decoded in batches of 64.
The runners take turns, and the fastest round of each counts. The table also gives the share of targets that are equal
to those of monoblock, token by token.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import monoblock as mb
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings
from monoblock.quantization.convert import quantize

RESULTS = Path(__file__).with_name("results") / "translate-cpu.md"
BEAMS, NEW, BATCH = 4, 14, 64
EOS, PAD = 0, 1
PAUSE_SECONDS = 0.3  # until the threads of the previous runner stop spinning
TokenRows = list[list[int]]


def save_marian(folder: Path, width: int, depth: int, heads: int, vocab: int) -> Any:
    """Save a Marian model with random weights, and return it."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sizes = {"encoder_layers": depth, "decoder_layers": depth}
    sizes |= {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
    sizes |= {"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width}
    config = transformers.MarianConfig(
        vocab_size=vocab,
        d_model=width,
        max_position_embeddings=128,
        eos_token_id=EOS,
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
        scale_embedding=True,
        **sizes,
    )
    torch.manual_seed(1)
    model = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "positions" not in name:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    model.generation_config.eos_token_id, model.generation_config.forced_eos_token_id = EOS, None
    model.generation_config.bad_words_ids = None
    model.save_pretrained(folder)
    return model


def random_sources(count: int, vocab: int) -> TokenRows:
    """Return random sources of lengths like those of Multi30k, mostly 8 to 20 tokens."""
    rng = random.Random(1)
    lengths = [min(40, max(4, round(rng.gauss(14, 5)))) for _ in range(count)]
    return [[rng.randrange(2, vocab) for _ in range(length)] + [EOS] for length in lengths]


def batch_indices(rows: TokenRows) -> list[list[int]]:
    """Return the indices of the rows in batches, longest rows first."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    return [order[first : first + BATCH] for first in range(0, len(order), BATCH)]


@functools.cache
def load_model(folder: Path, bits: int | None) -> mb.Transformer:
    model = mb.Transformer.from_pretrained(folder).eval()
    return model if bits is None else quantize(model, bits=bits)


def run_monoblock(folder: Path, rows: TokenRows, bits: int | None = None, **_: Any) -> TokenRows:
    model = load_model(folder, bits)
    settings = Settings(
        max_new_tokens=NEW, min_new_tokens=NEW, num_beams=BEAMS, eos_token_id=(EOS,), suppress_tokens=(PAD,)
    )
    targets: TokenRows = [[] for _ in rows]
    for indices in batch_indices(rows):
        engine = Engine(model, max_rows=BATCH * BEAMS, capacity=NEW + 1)
        index_by_request = {engine.add((PAD,), settings, rows[index]): index for index in indices}
        while engine.busy:
            for event in engine.step():
                targets[index_by_request[event.request_id]] = list(event.tokens)
    return targets


def pad_rows(rows: TokenRows, indices: list[int], pad: int) -> torch.Tensor:
    """Pad some rows on the right to (B, S)."""
    longest = max(len(rows[index]) for index in indices)
    return torch.tensor([rows[index] + [pad] * (longest - len(rows[index])) for index in indices])


@torch.inference_mode()
def run_transformers(folder: Path, rows: TokenRows, model: Any, **_: Any) -> TokenRows:
    targets: TokenRows = [[] for _ in rows]
    for indices in batch_indices(rows):
        ids = pad_rows(rows, indices, PAD)
        out = model.generate(
            ids,
            attention_mask=(ids != PAD).long(),
            num_beams=BEAMS,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            suppress_tokens=[PAD],
            do_sample=False,
        )
        for index, row in zip(indices, out[:, 1:].tolist(), strict=True):
            targets[index] = row
    return targets


@functools.cache
def load_ctranslate2(folder: Path, model: Any, threads: int, compute_type: str) -> Any:
    """Convert the model for CTranslate2, and load it."""
    import ctranslate2 as ct2
    from ctranslate2.converters import transformers as converters

    target = folder / "ctranslate2"
    if not target.exists():
        vocab = [f"t{index}" for index in range(model.config.vocab_size)]
        vocab[EOS] = "</s>"
        model.config.normalize_before = model.config.normalize_embedding = (
            False  # the differences between Marian and BART
        )
        spec = converters.BartLoader().get_model_spec(model)
        spec.register_source_vocabulary(vocab)
        spec.register_target_vocabulary(vocab)
        spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = vocab[PAD], "</s>", vocab[PAD]
        spec.config.decoder_start_token = vocab[PAD]
        spec.validate()
        spec.optimize()
        target.mkdir()
        spec.save(str(target))
    return ct2.Translator(str(target), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads)


def run_ctranslate2(
    folder: Path, rows: TokenRows, model: Any, threads: int, compute_type: str = "float32", **_: Any
) -> TokenRows:
    translator = load_ctranslate2(folder, model, threads, compute_type)
    sources = [[f"t{token}" for token in row[:-1]] + ["</s>"] for row in rows]
    options = {"min_decoding_length": NEW, "max_decoding_length": NEW, "suppress_sequences": [[f"t{PAD}"]]}
    results = translator.translate_batch(sources, beam_size=BEAMS, max_batch_size=BATCH, **options)
    return [[int(token[1:]) for token in result.hypotheses[0]] for result in results]


RUNNERS = {
    "monoblock": run_monoblock,
    "monoblock, 8 bits": functools.partial(run_monoblock, bits=8),
    "transformers": run_transformers,
    "CTranslate2, fp32": run_ctranslate2,
    "CTranslate2, int8": functools.partial(run_ctranslate2, compute_type="int8"),
}


def installed_runners(runners: dict[str, Any]) -> dict[str, Any]:
    """Return the runners without CTranslate2 if that is not installed."""
    return {name: run for name, run in runners.items() if "CTranslate2" not in name or find_spec("ctranslate2")}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    rows = random_sources(args.count, args.vocab)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = save_marian(folder, args.width, args.depth, args.heads, args.vocab)
        runners = {name: run for name, run in installed_runners(RUNNERS).items() if not args.only or name in args.only}
        seconds = dict.fromkeys(runners, float("inf"))
        targets: dict[str, TokenRows] = {}
        for _ in range(args.rounds):
            for name, run in runners.items():
                time.sleep(PAUSE_SECONDS)
                run(folder, rows[:BATCH], model=model, threads=args.threads)  # warm up
                start = time.perf_counter()
                targets[name] = run(folder, rows, model=model, threads=args.threads)
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    same = {
        name: sum(a == b for a, b in zip(tokens, targets["monoblock"], strict=True)) for name, tokens in targets.items()
    }
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"seconds": seconds, "same": same, "count": args.count, "threads": args.threads, "parameters": parameters}


def format_table(result: dict[str, Any]) -> str:
    ours, count = result["seconds"]["monoblock"], result["count"]
    lines = [
        f"{count:,} sources, beam {BEAMS}, {NEW} tokens each, {result['parameters']:,} parameters, "
        f"{result['threads']} threads, fp32, torch {torch.__version__}",
        "",
        "| runner | seconds | sentences per second | speedup of monoblock | same targets |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in result["seconds"].items():
        same = f"{100 * result['same'][name] / count:.1f} %"
        lines.append(f"| {name} | {seconds:.2f} | {count / seconds:.0f} | {seconds / ours:.2f} × | {same} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "count": 1000,
        "width": 256,
        "depth": 4,
        "heads": 4,
        "vocab": 8000,
        "threads": 2,
        "rounds": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", action="append")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    if args.smoke:
        args.count, args.width, args.depth, args.vocab, args.rounds = 7, 32, 1, 61, 1
    result = measure(args)
    print(json.dumps(result) if args.json else format_table(result))
    if args.write:
        RESULTS.write_text(format_table(result), encoding="utf-8")


if __name__ == "__main__":
    main()
