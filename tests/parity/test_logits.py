"""The block against the reference library: with the same random weights the same logits, a row of ROWS a structure.

python tests/parity/test_logits.py        prints the greatest difference of every row
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import weights as w  # noqa: E402

from monoblock.config import EmbeddingConfig, HeadConfig, ModelConfig, Scaling  # noqa: E402
from monoblock.knobs import vary  # noqa: E402
from monoblock.model import Transformer  # noqa: E402
from monoblock.presets import CONTEXT, HEAD_DIM, HIDDEN, VOCAB, WIDTH, WINDOW, tiny  # noqa: E402

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}  # fine enough to tell a norm's eps of 1e-12 from 1e-11
TOKENS, TARGET = 23, 19  # longer than a window, and than the distances T5 tells apart exactly
PADDING = (0, 4, 9)  # of each row of the batch
PROMPT = 11  # read at once, the rest token by token; longer than the ring of a window has room for
PAD_ID, FIRST_ID = 1, 3  # real tokens start after the special ones
SPECIAL = {"bos_token_id": 0, "eos_token_id": 2}


Answers = tuple[str, torch.Tensor, torch.Tensor]  # how it was run, ours, theirs


@dataclass(frozen=True, kw_only=True)
class Row:
    preset: str  # whose structure is built, at toy size
    model: str  # the published class
    table: tuple[tuple[str, str, Callable[..., Any]], ...]
    sizes: dict[str, Any]  # theirs; what is not given is the published class's own default
    knobs: dict[str, Any] = field(default_factory=dict)  # ours
    change: Callable[[ModelConfig], ModelConfig] = lambda config: config  # what no knob reaches
    places: bool = True  # the class takes position_ids; without, it counts as we do or only distances matter
    padded: tuple[str, ...] = ("left", "right")
    rounded: float = 0.0  # further from ours by a constant the class writes with so few digits


# -- the sizes, in the words of the published configurations ------------------------------------------------------

STANDARD = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": CONTEXT,
}
GROUPED = STANDARD | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": HEAD_DIM}
GROUPS = {"heads": 6, "kv_heads": 3, "head_dim": HEAD_DIM}
GPT = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_inner": HIDDEN, "n_layer": 3, "n_head": 3, "n_positions": CONTEXT}
ROBERTA = STANDARD | {"max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": WIDTH,
    "hidden_dim": HIDDEN,
    "n_layers": 2,
    "n_heads": 3,
    "max_position_embeddings": CONTEXT,
}
MODERNBERT = STANDARD | {
    "num_hidden_layers": 4,
    "local_attention": 2 * (WINDOW - 1),
    "pad_token_id": PAD_ID,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": HEAD_DIM, "d_ff": HIDDEN, "num_layers": 2, "num_heads": 3}
BART = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN,
    "max_position_embeddings": CONTEXT,
}
BLOOM = {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": 3, "n_head": 6}
MPT = {"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": 3, "n_heads": 6, "max_seq_len": CONTEXT}
FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "ffn_hidden_size": HIDDEN,
}
VIT = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 7,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rotary(base: float, kind: str = "default", **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **scaling}}


def masked_lm(**choices: Any) -> Callable[[ModelConfig], ModelConfig]:
    """The head the published encoder was trained with, in place of the preset's."""

    def change(config: ModelConfig) -> ModelConfig:
        assert isinstance(config.input, EmbeddingConfig)
        usual = {"kind": "masked_lm", "transform": "gelu", "bias": "learned", "norm": config.input.norm}
        return replace(config, head=HeadConfig(**(usual | choices)), tie="output")

    return change


ROWS: dict[str, Row] = {
    "gpt2": Row(preset="gpt2", model="GPT2LMHeadModel", table=w.GPT2, sizes=GPT, knobs={"depth": 3}),
    # The published poolers take the first column, which under left padding is no token.
    "bert": Row(preset="bert-base", model="BertModel", table=w.bert(""), sizes=STANDARD, padded=("right",)),
    "bert masked": Row(
        preset="bert-base", model="BertForMaskedLM", table=w.bert("bert."), sizes=STANDARD, change=masked_lm()
    ),
    "roberta": Row(
        preset="roberta-base",
        model="RobertaModel",
        table=w.bert(""),
        sizes=ROBERTA,
        places=False,
        padded=("right",),
    ),
    "roberta masked": Row(
        preset="roberta-base",
        model="RobertaForMaskedLM",
        table=w.bert("roberta."),
        sizes=ROBERTA,
        change=masked_lm(),
        places=False,
    ),
    "distilbert": Row(preset="distilbert", model="DistilBertModel", table=w.distilbert(""), sizes=DISTILBERT),
    "distilbert masked": Row(
        preset="distilbert",
        model="DistilBertForMaskedLM",
        table=w.distilbert("distilbert."),
        sizes=DISTILBERT,
        change=masked_lm(),
    ),
    "modernbert": Row(preset="modernbert-base", model="ModernBertModel", table=w.modernbert(""), sizes=MODERNBERT),
    "modernbert masked": Row(
        preset="modernbert-base",
        model="ModernBertForMaskedLM",
        table=w.modernbert("model."),
        sizes=MODERNBERT,
        change=masked_lm(transform_bias=False),
    ),
    "t5": Row(
        preset="t5-small",
        model="T5ForConditionalGeneration",
        table=w.T5,
        sizes=T5,
        knobs={"head_dim": HEAD_DIM},
        places=False,
    ),
    # BART counts columns, padding too, and takes no places: only right padding leaves its real tokens where they were.
    "bart": Row(
        preset="bart-base",
        model="BartForConditionalGeneration",
        table=w.BART,
        sizes=BART,
        places=False,
        padded=("right",),
    ),
    "llama": Row(
        preset="llama-7b",
        model="LlamaForCausalLM",
        table=w.LLAMA,
        sizes=STANDARD | {"head_dim": HEAD_DIM, "num_hidden_layers": 3},
        knobs={"head_dim": HEAD_DIM, "depth": 3},
    ),
    "llama3 scaled": Row(
        preset="llama3-8b",
        model="LlamaForCausalLM",
        table=w.LLAMA,
        sizes=GROUPED
        | {"rms_norm_eps": 1e-5}
        | rotary(500_000.0, "llama3", original_max_position_embeddings=16, **LLAMA3),
        knobs=GROUPS | {"scaling": Scaling(kind="llama3", original_context=16, **LLAMA3)},
    ),
    "mistral": Row(
        preset="mistral-7b",
        model="MistralForCausalLM",
        table=w.LLAMA,
        sizes=GROUPED | {"rms_norm_eps": 1e-5, "sliding_window": WINDOW},
        knobs=GROUPS,
    ),
    "mixtral": Row(
        preset="mixtral-8x7b",
        model="MixtralForCausalLM",
        table=w.MIXTRAL,
        sizes=GROUPED | {"num_local_experts": 5},
        knobs=GROUPS,
    ),
    "qwen3": Row(
        preset="qwen3-0.6b",
        model="Qwen3ForCausalLM",
        table=w.LLAMA,
        sizes=GROUPED | {"tie_word_embeddings": True} | rotary(1e6),
        knobs=GROUPS,
    ),
    "gemma2": Row(
        preset="gemma2-2b",
        model="Gemma2ForCausalLM",
        table=w.GEMMA2,
        sizes=GROUPED | {"num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 7},
        knobs=GROUPS | {"depth": 3, "scale": 7**-0.5},
    ),
    "gpt_neox": Row(
        preset="pythia-160m",
        model="GPTNeoXForCausalLM",
        table=w.NEOX,
        sizes=STANDARD | rotary(10_000.0, partial_rotary_factor=0.34),
    ),
    "gptj": Row(
        preset="gptj-6b",
        model="GPTJForCausalLM",
        table=w.GPTJ,
        sizes=GPT | {"rotary_dim": 4},
        knobs={"depth": 3},
    ),
    # BLOOM's own GELU writes sqrt(2 / pi) as 0.79788456.
    "bloom": Row(
        preset="bloom-560m",
        model="BloomForCausalLM",
        table=w.big_science(w.by_head),
        sizes=BLOOM,
        knobs={"depth": 3, "heads": 6, "hidden": 4 * WIDTH},
        places=False,
        rounded=1e-9,
    ),
    "mpt": Row(
        preset="mpt-7b",
        model="MptForCausalLM",
        table=w.MPT,
        sizes=MPT,
        knobs={"depth": 3, "heads": 6, "hidden": 4 * WIDTH},
        places=False,
    ),
    "falcon": Row(
        preset="falcon-7b",
        model="FalconForCausalLM",
        table=w.big_science(w.one_key_head),
        sizes=FALCON,
    ),
    "phi": Row(
        preset="phi-2",
        model="PhiForCausalLM",
        table=w.PHI,
        sizes=STANDARD | rotary(10_000.0, partial_rotary_factor=0.34),
    ),
    "olmo2": Row(
        preset="olmo2-7b",
        model="Olmo2ForCausalLM",
        table=w.OLMO2,
        sizes=STANDARD | {"num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": 1e-6} | rotary(500_000.0),
        knobs={"heads": 6, "kv_heads": 3},
    ),
    "vit": Row(preset="vit-b16", model="ViTForImageClassification", table=w.VIT, sizes=VIT),
}


# -- the two models -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Models built and run in `dtype`; in fp64 both sides also do in fp64 what they otherwise do in fp32.

    Published classes make softmax, norms and angles in fp32 whatever their weights are, which alone leaves 1e-7.
    """
    usual, threads = torch.get_default_dtype(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(torch, "float32", dtype)
            patch.setattr(torch, "float", dtype)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)  # sums this short lose more by waiting for a second thread than it gives
        try:
            yield
        finally:
            torch.set_default_dtype(usual)
            torch.set_num_threads(threads)


def published(cls: Any, sizes: dict[str, Any], draw: torch.Generator) -> torch.nn.Module:
    """The published class with every weight drawn anew, so that no norm is the identity and no bias zero."""
    config = cls.config_class(**(SPECIAL | sizes))
    config._attn_implementation = config._experts_implementation = "eager"
    model = cls(config).eval()
    with torch.no_grad():
        for weight in state(model).values():
            noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
            weight.copy_(weight + 0.3 * noise if weight.dim() == 1 else noise * weight.shape[-1] ** -0.5)
    return model


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What is stored of a model; a tied weight once, by its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        found.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(found.values())


def ours(row: Row, theirs: torch.nn.Module) -> Transformer:
    config = row.change(vary(tiny(row.preset), **row.knobs))
    model = Transformer(config).eval()
    stack = config.decoder or config.encoder
    assert stack is not None
    heads = next(stack.layers()).attention.heads
    model.load_state_dict(w.translate(row.table, state(theirs), heads), strict=True)
    return model


# -- what they are given, and what they say -----------------------------------------------------------------------


def mask(length: int, side: str) -> torch.Tensor:
    """(B, T) 1 for real tokens; padded on no side, on the left or on the right."""
    columns, padding = torch.arange(length), torch.tensor(PADDING)[:, None]
    real = {"none": columns >= 0 * padding, "left": columns >= padding, "right": columns < length - padding}
    return real[side].long()


def tokens(real: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    ids = torch.randint(FIRST_ID, VOCAB, real.shape, generator=draw)
    return ids.masked_fill(real == 0, PAD_ID)


def answer(output: Any) -> torch.Tensor:
    names = ("logits", "pooler_output", "last_hidden_state")
    return next(output[name] for name in names if output.get(name) is not None)


def see(mine: Transformer, theirs: torch.nn.Module, draw: torch.Generator) -> Iterator[Answers]:
    pixels = torch.randn(len(PADDING), 3, 12, 12, generator=draw, dtype=torch.float64).to(torch.get_default_dtype())
    yield "plain", mine(pixels), answer(theirs(pixel_values=pixels))


def read(row: Row, mine: Transformer, theirs: torch.nn.Module, side: str, draw: torch.Generator) -> Iterator[Answers]:
    """Over the real tokens, at once and, where there is a decoder, through the cache."""
    real = mask(TOKENS, side)
    ids = tokens(real, draw)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": real}
    if mine.config.family == "encoder-decoder":
        source, known = ids, real
        real = mask(TARGET, side)
        ids = tokens(real, draw)
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": real}

        def say(new: torch.Tensor, here: torch.Tensor, cache: Any = None) -> torch.Tensor:
            return mine(source, new, known, here, cache=cache)

    else:
        assert isinstance(mine.config.input, EmbeddingConfig)
        segments = None
        if mine.config.input.segments > 1:
            segments = given["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=draw)
        if row.places:
            given["position_ids"] = (real.cumsum(-1) - 1).clamp(min=0)

        def say(new: torch.Tensor, here: torch.Tensor, cache: Any = None) -> torch.Tensor:
            return mine(new, attention_mask=here, segments=segments, cache=cache)

    wanted = answer(theirs(**given))
    chosen = real.bool() if wanted.dim() == 3 else ...
    yield "plain", say(ids, real)[chosen], wanted[chosen]
    if mine.config.decoder is not None:
        for way, prompt in (("stepped", 1), ("prompted", PROMPT)):
            yield way, decode(mine, ids, real, prompt, say)[chosen], wanted[chosen]


def decode(mine: Transformer, ids: torch.Tensor, real: torch.Tensor, prompt: int, say: Any) -> torch.Tensor:
    """A prompt read at once and the rest one token at a time."""
    cache = mine.make_cache(len(PADDING), ids.shape[1], chunk=2)
    lengths = [prompt, *[1] * (ids.shape[1] - prompt)]
    parts = []
    for new, here in zip(ids.split(lengths, 1), real.split(lengths, 1), strict=True):
        parts.append(say(new, here, cache))
        cache.advance(new.shape[1] if bool(real.all()) else here.sum(-1))
    return torch.cat(parts, 1)


def compare(row: Row, dtype: torch.dtype) -> list[Answers]:
    """Every way to run the two models; a list, so that nothing stays patched once this returns."""
    cls = getattr(transformers, row.model)  # imported before any patch
    draw = torch.Generator().manual_seed(1)
    found = []
    with precision(dtype), torch.no_grad():
        theirs = published(cls, row.sizes, draw)
        mine = ours(row, theirs)
        if mine.config.family == "vision":
            return list(see(mine, theirs, draw))
        for side in ("none", *row.padded):
            for way, got, wanted in read(row, mine, theirs, side, draw):
                found.append((way if side == "none" else f"{way} {side}", got, wanted))
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_the_block_computes_what_the_published_class_computes(name, dtype):
    tolerance = max(TOLERANCE[dtype], ROWS[name].rounded)
    for way, got, wanted in compare(ROWS[name], dtype):
        assert got.dtype == wanted.dtype == dtype
        gap = float((got - wanted).abs().max())
        assert gap <= tolerance, f"{way}: {gap:.1e} apart"
        assert torch.equal(got.argmax(-1), wanted.argmax(-1)), f"{way}: another token is the likeliest"


def main() -> None:
    print(f"{'':20}{'greatest':>9}{'fp32':>10}{'fp64':>10}   the way that differs most in fp32")
    for name, row in ROWS.items():
        gaps = {d: {way: float((g - w).abs().max()) for way, g, w in compare(row, d)} for d in TOLERANCE}
        single, double = gaps.values()
        size = max(float(w.abs().max()) for _, _, w in compare(row, torch.float64))
        worst = max(single, key=single.__getitem__)
        print(f"{name:20}{size:9.1f}{single[worst]:10.1e}{max(double.values()):10.1e}   {worst}")


if __name__ == "__main__":
    main()
