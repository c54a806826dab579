"""Translating on the CPU, beam 4: this package beside transformers' Marian class and CTranslate2, the same weights.

    python benchmarks/translate_cpu.py --threads 2 --write

A Marian model with random weights reads 1,000 sources as long as Multi30k's and writes as many tokens as their targets
would have on average; no text ends earlier, so that all do the same work.  Sources are sorted by length and read 64 at
a time.  All take turns, and the quickest round of each counts: the one that was disturbed least.
The texts of this package and of transformers are compared: the share that is the same token by token is told.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import monoblock as mb
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings

RESULTS = Path(__file__).with_name("results") / "translate-cpu.md"
BEAMS, NEW, BATCH = 4, 14, 64
EOS, PAD = 0, 1
REST = 0.3  # seconds in which the threads of the one before stop waiting for more work
Rows = list[list[int]]


def marian(folder: Path, width: int, depth: int, heads: int, vocab: int) -> Any:
    """The model as transformers writes it."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sides = {"encoder_layers": depth, "decoder_layers": depth}
    sides |= {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
    sides |= {"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width}
    config = transformers.MarianConfig(
        vocab_size=vocab,
        d_model=width,
        max_position_embeddings=128,
        eos_token_id=EOS,
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
        scale_embedding=True,
        **sides,
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


def sources(count: int, vocab: int) -> Rows:
    """Lengths like Multi30k's: mostly 8 to 20 tokens."""
    chance = random.Random(1)
    lengths = [min(40, max(4, round(chance.gauss(14, 5)))) for _ in range(count)]
    return [[chance.randrange(2, vocab) for _ in range(length)] + [EOS] for length in lengths]


def batches(rows: Rows) -> list[list[int]]:
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    return [order[first : first + BATCH] for first in range(0, len(order), BATCH)]


@functools.cache
def loaded(folder: Path) -> mb.Transformer:
    return mb.Transformer.from_pretrained(folder).eval()


def ours(folder: Path, rows: Rows, **_: Any) -> Rows:
    model = loaded(folder)
    asked = Settings(
        max_new_tokens=NEW, min_new_tokens=NEW, num_beams=BEAMS, eos_token_id=(EOS,), suppress_tokens=(PAD,)
    )
    found: Rows = [[] for _ in rows]
    for some in batches(rows):
        engine = Engine(model, rows=BATCH * BEAMS, capacity=NEW + 1)
        order = {engine.add((PAD,), asked, rows[number]): number for number in some}
        while engine.busy:
            for event in engine.step():
                found[order[event.id]] = list(event.tokens)
    return found


@torch.inference_mode()
def theirs(folder: Path, rows: Rows, model: Any, **_: Any) -> Rows:
    found: Rows = [[] for _ in rows]
    for some in batches(rows):
        longest = max(len(rows[number]) for number in some)
        ids = torch.tensor([rows[number] + [PAD] * (longest - len(rows[number])) for number in some])
        out = model.generate(
            ids,
            attention_mask=(ids != PAD).long(),
            num_beams=BEAMS,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            suppress_tokens=[PAD],
            do_sample=False,
        )
        for number, row in zip(some, out[:, 1:].tolist(), strict=True):
            found[number] = row
    return found


@functools.cache
def converted(folder: Path, model: Any, threads: int) -> Any:
    """The same weights as CTranslate2 reads them."""
    import ctranslate2 as ct2
    from ctranslate2.converters import transformers as converters

    target = folder / "ctranslate2"
    if not target.exists():
        vocab = [f"t{number}" for number in range(model.config.vocab_size)]
        vocab[EOS] = "</s>"
        model.config.normalize_before = model.config.normalize_embedding = False  # what sets Marian apart from BART
        spec = converters.BartLoader().get_model_spec(model)
        spec.register_source_vocabulary(vocab)
        spec.register_target_vocabulary(vocab)
        spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = vocab[PAD], "</s>", vocab[PAD]
        spec.config.decoder_start_token = vocab[PAD]
        spec.validate()
        spec.optimize()
        target.mkdir()
        spec.save(str(target))
    return ct2.Translator(str(target), device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads)


def ctranslate2(folder: Path, rows: Rows, model: Any, threads: int, **_: Any) -> Rows:
    translator = converted(folder, model, threads)
    texts = [[f"t{number}" for number in row[:-1]] + ["</s>"] for row in rows]
    lengths, never = {"min_decoding_length": NEW, "max_decoding_length": NEW}, {"suppress_sequences": [[f"t{PAD}"]]}
    out = translator.translate_batch(texts, beam_size=BEAMS, max_batch_size=BATCH, **lengths, **never)
    return [[int(token[1:]) for token in one.hypotheses[0]] for one in out]


RUNNERS = {"monoblock": ours, "transformers": theirs, "CTranslate2, fp32": ctranslate2}


def measured(given: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(given.threads)
    rows = sources(given.count, given.vocab)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = marian(folder, given.width, given.depth, given.heads, given.vocab)
        runners = {name: run for name, run in RUNNERS.items() if not given.only or name in given.only}
        seconds = dict.fromkeys(runners, float("inf"))
        texts: dict[str, Rows] = {}
        for _ in range(given.rounds):
            for name, run in runners.items():
                time.sleep(REST)
                run(folder, rows[:BATCH], model=model, threads=given.threads)  # what is made once is not measured
                begun = time.perf_counter()
                texts[name] = run(folder, rows, model=model, threads=given.threads)
                seconds[name] = min(seconds[name], time.perf_counter() - begun)
    same = {name: sum(a == b for a, b in zip(rows_, texts["monoblock"], strict=True)) for name, rows_ in texts.items()}
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"seconds": seconds, "same": same, "count": given.count, "threads": given.threads, "parameters": parameters}


def table(found: dict[str, Any]) -> str:
    ours, count = found["seconds"]["monoblock"], found["count"]
    lines = [
        f"{count:,} sources, beam {BEAMS}, {NEW} tokens each, {found['parameters']:,} parameters, "
        f"{found['threads']} threads, fp32, torch {torch.__version__}",
        "",
        "| who | seconds | sentences a second | monoblock is faster by | same texts |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in found["seconds"].items():
        same = f"{100 * found['same'][name] / count:.1f} %"
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
    parser.add_argument("--write", action="store_true", help=f"put the table into results/{RESULTS.name}")
    given = parser.parse_args()
    if given.smoke:
        given.count, given.width, given.depth, given.vocab, given.rounds = 7, 32, 1, 61, 1
    found = measured(given)
    print(json.dumps(found) if given.json else table(found))
    if given.write:
        RESULTS.write_text(table(found), encoding="utf-8")


if __name__ == "__main__":
    main()
