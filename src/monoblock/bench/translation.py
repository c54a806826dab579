"""Translate with beam search, beside transformers (Marian) and CTranslate2 with the same weights.

Targets have a fixed length, and no search ends earlier, so that all runners do the same work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monoblock.bench.generation import RunnerUnavailable, silence_transformers
from monoblock.config.families import vaswani
from monoblock.inference.engine import Engine
from monoblock.inference.optimized import optimize
from monoblock.inference.settings import Settings
from monoblock.model import Transformer
from monoblock.quantization.convert import quantize

BEAMS, NEW, BATCH = 4, 14, 64
EOS, PAD = 0, 1
PAUSE_SECONDS = 0.3  # until the threads of the previous runner stop spinning
TokenRows = list[list[int]]
Translate = Callable[[TokenRows], TokenRows]


class Shape(NamedTuple):
    width: int = 256
    depth: int = 4
    heads: int = 4
    vocab: int = 8000


class TranslationSetup(NamedTuple):
    """What a runner is built from: our model, Marian with the same weights, its folder, the device, the CPU threads."""

    model: Transformer
    marian: Any  # None without transformers
    folder: Path
    device: str
    threads: int


def build_setup(
    folder: Path, shape: Shape, device: str, threads: int, dtype: torch.dtype = torch.float32
) -> TranslationSetup:
    """Build a Marian model with random weights in transformers and load it; without transformers, build ours alone."""
    if find_spec("transformers") is None:
        torch.manual_seed(1)
        config = vaswani(vocab=shape.vocab, width=shape.width, depth=shape.depth, heads=shape.heads, context=128)
        return TranslationSetup(Transformer(config).to(device, dtype).eval(), None, folder, device, threads)
    marian = save_marian(folder, shape).to(device, dtype)
    model = Transformer.from_pretrained(folder, device=device, dtype=dtype).eval()
    return TranslationSetup(model, marian, folder, device, threads)


def save_marian(folder: Path, shape: Shape) -> Any:
    """Save a Marian model with random weights, and return it."""
    transformers: Any = import_module("transformers")
    with silence_transformers():
        sizes = {"encoder_layers": shape.depth, "decoder_layers": shape.depth}
        sizes |= {"encoder_attention_heads": shape.heads, "decoder_attention_heads": shape.heads}
        sizes |= {"encoder_ffn_dim": 4 * shape.width, "decoder_ffn_dim": 4 * shape.width}
        config = transformers.MarianConfig(
            vocab_size=shape.vocab,
            d_model=shape.width,
            max_position_embeddings=128,
            eos_token_id=EOS,
            pad_token_id=PAD,
            decoder_start_token_id=PAD,
            scale_embedding=True,
            **sizes,
        )
        torch.manual_seed(1)
        model: Any = transformers.MarianMTModel(config).eval()
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


def pad_rows(rows: TokenRows, indices: list[int], pad: int) -> torch.Tensor:
    """Pad some rows on the right to (B, S)."""
    longest = max(len(rows[index]) for index in indices)
    return torch.tensor([rows[index] + [pad] * (longest - len(rows[index])) for index in indices])


# -- runners ----------------------------------------------------------------------------------------------------------


def search_batches(
    model: Transformer, rows: TokenRows, start: tuple[int, ...], settings: Settings, new: int
) -> TokenRows:
    """Translate the rows in batches with our engine; return the best target of each row."""
    targets: TokenRows = [[] for _ in rows]
    fast = optimize(model)
    for indices in batch_indices(rows):
        engine = Engine(fast, max_rows=BATCH * settings.num_beams, capacity=new + 1)
        index_by_request = {engine.add(start, settings, rows[index]): index for index in indices}
        while engine.busy:
            for event in engine.step():
                targets[index_by_request[event.request_id]] = list(event.tokens)
    return targets


def monoblock_translator(setup: TranslationSetup, bits: int | None = None, activation_bits: int = 16) -> Translate:
    model = setup.model if bits is None else quantize(setup.model, bits=bits, activation_bits=activation_bits).eval()
    settings = Settings(
        max_new_tokens=NEW, min_new_tokens=NEW, num_beams=BEAMS, eos_token_id=(EOS,), suppress_tokens=(PAD,)
    )
    return lambda rows: search_batches(model, rows, (PAD,), settings, NEW)


def transformers_translator(setup: TranslationSetup) -> Translate:
    if setup.marian is None:
        raise RunnerUnavailable("not installed")
    lengths = {"min_new_tokens": NEW, "max_new_tokens": NEW}

    @torch.inference_mode()
    def run(rows: TokenRows) -> TokenRows:
        targets: TokenRows = [[] for _ in rows]
        for indices in batch_indices(rows):
            ids = pad_rows(rows, indices, PAD).to(setup.device)
            mask = (ids != PAD).long()
            with silence_transformers():
                out = setup.marian.generate(
                    ids, attention_mask=mask, num_beams=BEAMS, suppress_tokens=[PAD], do_sample=False, **lengths
                )
            for index, row in zip(indices, out[:, 1:].tolist(), strict=True):
                targets[index] = row
        return targets

    return run


def ctranslate2_translator(setup: TranslationSetup, compute_type: str) -> Translate:
    if find_spec("ctranslate2") is None:
        raise RunnerUnavailable("not installed")
    if setup.marian is None:
        raise RunnerUnavailable("it needs transformers to convert the model")
    ctranslate2: Any = import_module("ctranslate2")
    target = setup.folder / "ctranslate2"
    if not target.exists():
        _convert_for_ctranslate2(setup.marian, target)
    options = {"compute_type": compute_type, "inter_threads": 1, "intra_threads": setup.threads}
    translator = ctranslate2.Translator(str(target), device=torch.device(setup.device).type, **options)

    def run(rows: TokenRows) -> TokenRows:
        sources = [[f"t{token}" for token in row[:-1]] + ["</s>"] for row in rows]
        lengths = {"min_decoding_length": NEW, "max_decoding_length": NEW, "suppress_sequences": [[f"t{PAD}"]]}
        results = translator.translate_batch(sources, beam_size=BEAMS, max_batch_size=BATCH, **lengths)
        return [[int(token[1:]) for token in result.hypotheses[0]] for result in results]

    return run


def _convert_for_ctranslate2(marian: Any, folder: Path) -> None:
    converters: Any = import_module("ctranslate2.converters.transformers")
    vocab = [f"t{index}" for index in range(marian.config.vocab_size)]
    vocab[EOS] = "</s>"
    marian.config.normalize_before = marian.config.normalize_embedding = False  # where Marian differs from BART
    spec = converters.BartLoader().get_model_spec(marian)
    spec.register_source_vocabulary(vocab)
    spec.register_target_vocabulary(vocab)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = vocab[PAD], "</s>", vocab[PAD]
    spec.config.decoder_start_token = vocab[PAD]
    spec.validate()
    spec.optimize()
    folder.mkdir()
    spec.save(str(folder))


# Name -> function that builds the runner, or raises RunnerUnavailable.
TRANSLATORS: dict[str, Callable[[TranslationSetup], Translate]] = {
    "monoblock": monoblock_translator,
    "monoblock, 8 bits": partial(monoblock_translator, bits=8),
    "monoblock, 8 bits, 8-bit activations": partial(monoblock_translator, bits=8, activation_bits=8),
    "transformers": transformers_translator,
    "CTranslate2, fp32": partial(ctranslate2_translator, compute_type="float32"),
    "CTranslate2, int8": partial(ctranslate2_translator, compute_type="int8"),
}


class TranslationResult(NamedTuple):
    seconds: dict[str, float]  # of the fastest round, by runner
    targets: dict[str, TokenRows]
    absent: dict[str, str]  # reason by runner


def time_translators(setup: TranslationSetup, names: list[str], rows: TokenRows, rounds: int) -> TranslationResult:
    """Translate the rows with each runner, in turns."""
    runners: dict[str, Translate] = {}
    result = TranslationResult({}, {}, {})
    for name in names:
        try:
            runners[name] = TRANSLATORS[name](setup)
        except RunnerUnavailable as problem:
            result.absent[name] = str(problem)
    for _ in range(rounds):
        for name, run in runners.items():
            time.sleep(PAUSE_SECONDS)
            run(rows[:BATCH])  # warm up
            start = time.perf_counter()
            result.targets[name] = run(rows)
            result.seconds[name] = min(result.seconds.get(name, float("inf")), time.perf_counter() - start)
    return result
