"""Translating Multi30k on the CPU with trained weights, beam 4: this package, transformers and CTranslate2.

    monoblock train multi30k-cpu                    # or any run folder of an encoder-decoder with norms in front
    python benchmarks/translate_real.py runs/multi30k-cpu --data DIR --threads 2 --write

All read the same tokens of test 2016, the longest first and 64 at a time, and end a search when four texts have ended
or are 100 tokens long.  transformers runs the weights in its M2M100 class (Marian's with the norms in front), and
CTranslate2 as converted from that.  All take turns, and the quickest round of each counts.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import monoblock as mb
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings
from monoblock.positions import sinusoid
from monoblock.tasks import scores
from monoblock.tasks.pipeline import Pipeline, load

RESULTS = Path(__file__).with_name("results") / "translate-real-cpu.md"
BEAMS, NEW, BATCH = 4, 100, 64
REST = 0.3  # seconds in which the threads of the one before stop waiting for more work
Rows = list[list[int]]

NORMS = {"attention_norm": "self_attn_layer_norm", "cross_norm": "encoder_attn_layer_norm"}
LAYER = NORMS | {"feedforward_norm": "final_layer_norm", "feedforward.up": "fc1", "feedforward.down": "fc2"}
PARTS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
HEADS = {f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in PARTS.items()}
HEADS |= {f"cross.{ours}": f"encoder_attn.{theirs}" for ours, theirs in PARTS.items()}


def renamed(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights by the names that transformers gives them."""
    for name, weight in weights.items():
        stack, _, rest = name.partition(".")
        if stack == "input":
            yield from ((place, weight) for place in ("model.shared.weight", "lm_head.weight"))
        elif rest.startswith("norm."):
            yield f"model.{stack}.layer_norm.{rest.removeprefix('norm.')}", weight
        else:
            number, _, part = rest.partition(".")
            layer, _, kind = part.rpartition(".")
            yield f"model.{stack}.layers.{number}.{(LAYER | HEADS)[layer]}.{kind}", weight


class Placed(nn.Module):
    """Places as the trained model has them; padding comes last, so that they are counted from the first token."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, past_key_values_length: int = 0) -> Tensor:
        given = input_ids if input_ids is not None else inputs_embeds
        return self.weight[past_key_values_length : past_key_values_length + given.shape[1]].expand(len(given), -1, -1)


def theirs_of(pipe: Pipeline) -> Any:
    """The model in transformers' class."""
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
        decoder_start_token_id=pipe.defaults.start,
        scale_embedding=True,
        max_position_embeddings=model.config.input.vocab,  # its own places are not used, yet begin at the padding's id
        **depths,
        **sizes,
        **tokens,
    )
    other = transformers.M2M100ForConditionalGeneration(config).eval()
    missing, unexpected = other.load_state_dict(dict(renamed(model.state_dict())), strict=False)
    if unexpected or [name for name in missing if "embed_tokens" not in name]:
        raise SystemExit(f"weights that do not fit: {unexpected or missing}")
    places = sinusoid(torch.arange(model.config.context), model.config.width, model.config.input.positions)
    other.model.encoder.embed_positions = other.model.decoder.embed_positions = Placed(places)
    return other


def batches(rows: Rows) -> list[list[int]]:
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    return [order[first : first + BATCH] for first in range(0, len(order), BATCH)]


def ours(pipe: Pipeline, rows: Rows, **_: Any) -> Rows:
    asked = Settings(max_new_tokens=NEW, num_beams=BEAMS, early_stopping=True, eos_token_id=(pipe.tokenizer.eos_id,))
    found: Rows = [[] for _ in rows]
    for some in batches(rows):
        engine = Engine(pipe.model, rows=BATCH * BEAMS, capacity=NEW + 1)
        order = {engine.add((pipe.defaults.start,), asked, rows[number]): number for number in some}
        while engine.busy:
            for event in engine.step():
                found[order[event.id]] = list(event.tokens)
    return found


@torch.inference_mode()
def theirs(pipe: Pipeline, rows: Rows, model: Any, **_: Any) -> Rows:
    pad, found = pipe.tokenizer.pad_id, [[] for _ in rows]
    for some in batches(rows):
        longest = max(len(rows[number]) for number in some)
        ids = torch.tensor([rows[number] + [pad] * (longest - len(rows[number])) for number in some])
        asked = {"num_beams": BEAMS, "max_new_tokens": NEW, "early_stopping": True, "do_sample": False}
        out = model.generate(ids, attention_mask=(ids != pad).long(), **asked)
        for number, row in zip(some, out[:, 1:].tolist(), strict=True):
            found[number] = row
    return found


@functools.cache
def converted(folder: str, model: Any, eos: int, threads: int) -> Any:
    import ctranslate2 as ct2
    from ctranslate2.converters import transformers as converters

    vocab = [f"t{number}" for number in range(model.config.vocab_size)]
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
    return ct2.Translator(folder, device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads)


def ctranslate2(pipe: Pipeline, rows: Rows, model: Any, folder: str, threads: int) -> Rows:
    translator = converted(folder, model, pipe.tokenizer.eos_id, threads)
    texts = [[f"t{number}" for number in row] for row in rows]
    out = translator.translate_batch(texts, beam_size=BEAMS, max_batch_size=BATCH, max_decoding_length=NEW)
    return [[int(token[1:]) for token in one.hypotheses[0]] for one in out]


RUNNERS = {"monoblock": ours, "transformers": theirs, "CTranslate2, fp32": ctranslate2}


def trained(given: argparse.Namespace) -> tuple[Pipeline, Rows, list[str]]:
    """The model, its sources and what they should become."""
    if given.model is None or given.data is None:
        raise SystemExit(
            "give the folder of a run and --data with multi30k/test_2016_flickr.de and .en in it, or --smoke"
        )
    pipe, folder = load(given.model), Path(given.data) / "multi30k"
    german, english = (
        (folder / f"test_2016_flickr.{side}").read_text(encoding="utf-8").splitlines()[: given.count]
        for side in ("de", "en")
    )
    return pipe, [list(pipe.prompt(line).source or ()) for line in german], english


def made_up() -> tuple[Any, Rows, list[str]]:
    """The same of a model that has learnt nothing."""
    model = mb.Transformer(mb.vaswani(vocab=61, width=32, depth=1, heads=2, hidden=64, context=128, norm_place="pre"))
    tokenizer = SimpleNamespace(eos_id=2, pad_id=0, decode=lambda ids: " ".join(map(str, ids)))
    pipe = SimpleNamespace(model=model.eval(), tokenizer=tokenizer, defaults=SimpleNamespace(start=1))
    return pipe, [[*range(5, 9 + n), 2] for n in range(7)], ["5 6 7 8"] * 7


def measured(given: argparse.Namespace) -> str:
    torch.set_num_threads(given.threads)
    pipe, rows, english = made_up() if given.smoke else trained(given)
    model = theirs_of(pipe)
    seconds, found = dict.fromkeys(RUNNERS, float("inf")), {}
    with tempfile.TemporaryDirectory() as place:
        for _ in range(given.rounds):
            for name, run in RUNNERS.items():
                time.sleep(REST)
                options = {"model": model, "folder": place, "threads": given.threads}
                run(pipe, rows[:BATCH], **options)  # what is made once is not measured
                begun = time.perf_counter()
                texts = run(pipe, rows, **options)
                seconds[name] = min(seconds[name], time.perf_counter() - begun)
                special = {pipe.tokenizer.eos_id, pipe.tokenizer.pad_id, pipe.defaults.start}
                found[name] = [pipe.tokenizer.decode([t for t in row if t not in special]) for row in texts]
    return table(found, english, seconds, sum(weight.numel() for weight in pipe.model.parameters()), given.threads)


def table(
    found: dict[str, list[str]], english: list[str], seconds: dict[str, float], parameters: int, threads: int
) -> str:
    count, ours = len(english), seconds["monoblock"]
    lines = [
        f"{count:,} sentences of Multi30k test 2016, de→en, beam {BEAMS}, {parameters:,} trained parameters, "
        f"{threads} threads, fp32, torch {torch.__version__}",
        "",
        "| who | seconds | sentences a second | monoblock is faster by | BLEU | same texts |",
        "|---|---|---|---|---|---|",
    ]
    for name, spent in seconds.items():
        bleu = scores.bleu(found[name], [[line] for line in english])
        same = sum(a == b for a, b in zip(found[name], found["monoblock"], strict=True))
        speed = f"{spent:.2f} | {count / spent:.0f} | {spent / ours:.2f} ×"
        lines.append(f"| {name} | {speed} | {bleu.value:.2f} | {100 * same / count:.1f} % |")
    return "\n".join([*lines, "", f"BLEU: {bleu.signature}"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="the folder of a run")
    parser.add_argument("--smoke", action="store_true", help="a made-up model and a few sentences")
    parser.add_argument("--data", help="the folder that holds multi30k/test_2016_flickr.de and .en")
    for name, value in {"count": 1000, "threads": 2, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--write", action="store_true", help=f"put the table into results/{RESULTS.name}")
    given = parser.parse_args()
    given.rounds = 1 if given.smoke else given.rounds
    found = measured(given)
    print(found)
    if given.write:
        RESULTS.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()
