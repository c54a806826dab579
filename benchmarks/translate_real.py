"""Translation of Multi30k on the CPU with trained weights and beam 4, compared with transformers and CTranslate2.

    monoblock train multi30k-cpu                    # or any run folder of an encoder-decoder with pre-norm
    python benchmarks/translate_real.py runs/multi30k-cpu --data DIR --threads 2 --write

All read the same tokens of test 2016, longest sources first, in batches of 64; a search ends when four hypotheses are
finished or 100 tokens are generated. transformers runs the weights in its M2M100 class (Marian with pre-norm), and
CTranslate2 a conversion of that. The runners take turns, and the fastest round of each counts.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import monoblock as mb
from monoblock.bench.translation import (
    BATCH,
    BEAMS,
    PAUSE_SECONDS,
    TokenRows,
    batch_indices,
    pad_rows,
    search_batches,
)
from monoblock.inference.settings import Settings
from monoblock.metrics.text import bleu
from monoblock.nn.positions import sinusoid
from monoblock.quantization.convert import quantize
from monoblock.runs.load import load
from monoblock.runs.pipeline import Pipeline

RESULTS = Path(__file__).with_name("results") / "translate-real-cpu.md"
NEW = 100  # tokens of a target at most

NORM_NAMES = {"attention_norm": "self_attn_layer_norm", "cross_norm": "encoder_attn_layer_norm"}
LAYER_NAMES = NORM_NAMES | {"feedforward_norm": "final_layer_norm", "feedforward.up": "fc1", "feedforward.down": "fc2"}
PROJECTION_NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
LAYER_NAMES |= {f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in PROJECTION_NAMES.items()}
LAYER_NAMES |= {f"cross.{ours}": f"encoder_attn.{theirs}" for ours, theirs in PROJECTION_NAMES.items()}


def rename_weights(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under their names in transformers."""
    for name, weight in weights.items():
        stack, _, rest = name.partition(".")
        if stack == "input":
            yield from ((shared, weight) for shared in ("model.shared.weight", "lm_head.weight"))
        elif rest.startswith("norm."):
            yield f"model.{stack}.layer_norm.{rest.removeprefix('norm.')}", weight
        else:
            index, _, module = rest.partition(".")
            module, _, kind = module.rpartition(".")
            yield f"model.{stack}.layers.{index}.{LAYER_NAMES[module]}.{kind}", weight


class PositionTable(nn.Module):
    """The positions of the trained model, counted from the first token: padding is on the right."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, past_key_values_length: int = 0) -> Tensor:
        inputs = input_ids if input_ids is not None else inputs_embeds
        end = past_key_values_length + inputs.shape[1]
        return self.weight[past_key_values_length:end].expand(len(inputs), -1, -1)


def to_transformers(pipe: Pipeline) -> Any:
    """Return the model in the M2M100 class of transformers."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    model, block = pipe.model, pipe.model.config.decoder.pattern[0].blocks[0]
    depths = {f"{side}_layers": len(getattr(model, side).blocks) for side in ("encoder", "decoder")}
    sizes = {f"{side}_attention_heads": block.attention.heads for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": block.feedforward.hidden for side in ("encoder", "decoder")}
    tokens = {"eos_token_id": pipe.tokenizer.eos_id, "pad_token_id": pipe.tokenizer.pad_id}
    config = transformers.M2M100Config(
        vocab_size=model.config.input.vocab,
        d_model=model.config.width,
        activation_function=block.feedforward.activation,
        decoder_start_token_id=pipe.defaults.decoder_start_token_id,
        scale_embedding=True,
        max_position_embeddings=model.config.input.vocab,  # its positions are not used, but start at the id of padding
        **depths,
        **sizes,
        **tokens,
    )
    converted = transformers.M2M100ForConditionalGeneration(config).eval()
    missing, unexpected = converted.load_state_dict(dict(rename_weights(model.state_dict())), strict=False)
    if unexpected or [name for name in missing if "embed_tokens" not in name]:
        raise SystemExit(f"weights that do not match: {unexpected or missing}")
    positions = sinusoid(torch.arange(model.config.context), model.config.width, model.config.input.positions)
    converted.model.encoder.embed_positions = converted.model.decoder.embed_positions = PositionTable(positions)
    return converted


@functools.cache
def quantized(model: mb.Transformer) -> mb.Transformer:
    return quantize(model, bits=8).eval()


def run_monoblock(pipe: Pipeline, rows: TokenRows, is_quantized: bool = False, **_: Any) -> TokenRows:
    settings = Settings(max_new_tokens=NEW, num_beams=BEAMS, early_stopping=True, eos_token_id=(pipe.tokenizer.eos_id,))
    model = quantized(pipe.model) if is_quantized else pipe.model
    return search_batches(model, rows, (pipe.defaults.decoder_start_token_id,), settings, NEW)


@torch.inference_mode()
def run_transformers(pipe: Pipeline, rows: TokenRows, model: Any, **_: Any) -> TokenRows:
    pad, targets = pipe.tokenizer.pad_id, [[] for _ in rows]
    options = {"num_beams": BEAMS, "max_new_tokens": NEW, "early_stopping": True, "do_sample": False}
    for indices in batch_indices(rows):
        ids = pad_rows(rows, indices, pad)
        out = model.generate(ids, attention_mask=(ids != pad).long(), **options)
        for index, row in zip(indices, out[:, 1:].tolist(), strict=True):
            targets[index] = row
    return targets


@functools.cache
def load_ctranslate2(folder: str, model: Any, eos: int, threads: int, compute_type: str) -> Any:
    import ctranslate2 as ct2
    from ctranslate2.converters import transformers as converters

    vocab = [f"t{index}" for index in range(model.config.vocab_size)]
    model.config.normalize_before, model.config.normalize_embedding = True, False
    spec = converters.BartLoader().get_model_spec(model)
    spec.register_source_vocabulary(vocab)
    spec.register_target_vocabulary(vocab)
    start = vocab[model.config.decoder_start_token_id]
    spec.config.bos_token = spec.config.unk_token = spec.config.decoder_start_token = start
    spec.config.eos_token = vocab[eos]
    spec.validate()
    spec.optimize()
    spec.save(folder)
    return ct2.Translator(folder, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads)


def run_ctranslate2(
    pipe: Pipeline, rows: TokenRows, model: Any, folder: str, threads: int, compute_type: str = "float32"
) -> TokenRows:
    translator = load_ctranslate2(folder, model, pipe.tokenizer.eos_id, threads, compute_type)
    sources = [[f"t{token}" for token in row] for row in rows]
    results = translator.translate_batch(sources, beam_size=BEAMS, max_batch_size=BATCH, max_decoding_length=NEW)
    return [[int(token[1:]) for token in result.hypotheses[0]] for result in results]


RUNNERS = {
    "monoblock": run_monoblock,
    "monoblock, 8 bits": functools.partial(run_monoblock, is_quantized=True),
    "transformers": run_transformers,
    "CTranslate2, fp32": run_ctranslate2,
    "CTranslate2, int8": functools.partial(run_ctranslate2, compute_type="int8"),
}


def load_run(args: argparse.Namespace) -> tuple[Pipeline, TokenRows, list[str]]:
    """Return the model, the sources and the references."""
    if args.model is None or args.data is None:
        raise SystemExit("give a run folder and --data with multi30k/test_2016_flickr.de and .en, or --smoke")
    pipe, folder = load(args.model), Path(args.data) / "multi30k"
    german, english = (
        (folder / f"test_2016_flickr.{side}").read_text(encoding="utf-8").splitlines()[: args.count]
        for side in ("de", "en")
    )
    return pipe, [list(pipe.encode_prompt(line).source or ()) for line in german], english


def build_toy() -> tuple[Any, TokenRows, list[str]]:
    """Return an untrained model with toy sources and references."""
    model = mb.Transformer(mb.vaswani(vocab=61, width=32, depth=1, heads=2, hidden=64, context=128, norm_place="pre"))
    tokenizer = SimpleNamespace(eos_id=2, pad_id=0, decode=lambda ids: " ".join(map(str, ids)))
    pipe = SimpleNamespace(model=model.eval(), tokenizer=tokenizer, defaults=SimpleNamespace(decoder_start_token_id=1))
    return pipe, [[*range(5, 9 + n), 2] for n in range(7)], ["5 6 7 8"] * 7


def measure(args: argparse.Namespace) -> str:
    torch.set_num_threads(args.threads)
    pipe, rows, references = build_toy() if args.smoke else load_run(args)
    model = to_transformers(pipe)
    special = {pipe.tokenizer.eos_id, pipe.tokenizer.pad_id, pipe.defaults.decoder_start_token_id}
    runners = {name: run for name, run in RUNNERS.items() if "CTranslate2" not in name or find_spec("ctranslate2")}
    seconds, texts = dict.fromkeys(runners, float("inf")), {}
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(args.rounds):
            for name, run in runners.items():
                time.sleep(PAUSE_SECONDS)
                options = {"model": model, "folder": temporary, "threads": args.threads}
                run(pipe, rows[:BATCH], **options)  # warm up
                start = time.perf_counter()
                targets = run(pipe, rows, **options)
                seconds[name] = min(seconds[name], time.perf_counter() - start)
                texts[name] = [pipe.tokenizer.decode([t for t in row if t not in special]) for row in targets]
    parameters = sum(weight.numel() for weight in pipe.model.parameters())
    return format_table(texts, references, seconds, parameters, args.threads)


def format_table(
    texts: dict[str, list[str]], references: list[str], seconds: dict[str, float], parameters: int, threads: int
) -> str:
    count, ours = len(references), seconds["monoblock"]
    lines = [
        f"{count:,} sentences of Multi30k test 2016, de→en, beam {BEAMS}, {parameters:,} trained parameters, "
        f"{threads} threads, torch {torch.__version__}",
        "",
        "| runner | seconds | sentences per second | speedup of monoblock | BLEU | same targets |",
        "|---|---|---|---|---|---|",
    ]
    for name, total in seconds.items():
        score = bleu(texts[name], [[line] for line in references])
        same = sum(a == b for a, b in zip(texts[name], texts["monoblock"], strict=True))
        speed = f"{total:.2f} | {count / total:.0f} | {total / ours:.2f} ×"
        lines.append(f"| {name} | {speed} | {score.value:.2f} | {100 * same / count:.1f} % |")
    return "\n".join([*lines, "", f"BLEU: {score.signature}"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="run folder")
    parser.add_argument("--smoke", action="store_true", help="a toy model and a few sentences")
    parser.add_argument("--data", help="folder with multi30k/test_2016_flickr.de and .en")
    for name, value in {"count": 1000, "threads": 2, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    args.rounds = 1 if args.smoke else args.rounds
    table = measure(args)
    print(table)
    if args.write:
        RESULTS.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
