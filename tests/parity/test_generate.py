"""The same tokens as transformers' `generate`: every one of 50 prompts, greedy and with beams, for four families."""

import itertools
import warnings
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from monoblock.model import Transformer  # noqa: E402

VOCAB, PROMPTS, NEW = 61, 50, 13
START, PAD = 3, 1
SPECIAL = {"bos_token_id": START, "eos_token_id": 2, "pad_token_id": PAD, "vocab_size": VOCAB}
LONG = {"max_position_embeddings": 64}
BOTH = {"decoder_start_token_id": START, "is_encoder_decoder": True}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {"n_positions": 64, "n_embd": 36, "n_layer": 2, "n_head": 3}),
    "llama": (
        "LlamaForCausalLM",
        LONG | {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
         "intermediate_size": 46},
    ),
    "t5": ("T5ForConditionalGeneration", BOTH | {"d_model": 36, "num_layers": 2, "num_heads": 3, "d_kv": 12,
                                                 "d_ff": 46}),
    "bart": (
        "BartForConditionalGeneration",
        BOTH | LONG | {"d_model": 36, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
                "decoder_attention_heads": 3, "encoder_ffn_dim": 46, "decoder_ffn_dim": 46,
                "forced_eos_token_id": None},
    ),
}  # fmt: skip
BEAMS = {
    f"beams, penalty {penalty}, early {early}": {"num_beams": 4, "length_penalty": penalty, "early_stopping": early}
    for penalty, early in itertools.product((0.6, 1.0, 2.0), (False, True, "never"))
}
LONG_ONES = [way for way in BEAMS if "penalty 2.0" in way]  # so much for length that the best may be the longest
CONTROL = {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2}
WAYS = {
    "greedy": {},
    "greedy, no 3-gram twice": {"no_repeat_ngram_size": 3},
    "greedy, repetition 1.2": {"repetition_penalty": 1.2},
    **BEAMS,
    "beams, no 3-gram twice": {"num_beams": 4, "no_repeat_ngram_size": 3},
    "beams, repetition 1.2": {"num_beams": 4, "repetition_penalty": 1.2},
    "beams, both, n-best": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.6} | CONTROL,
    "beams, at least 5": {"num_beams": 4, "min_new_tokens": 5, "bad_words_ids": [[11], [13, 17]]},
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """Ours and theirs with the same weights, strong enough that texts differ and some end early."""
    name, sizes = MODELS[request.param]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    cls = getattr(transformers, name)
    config = cls.config_class(**(SPECIAL | sizes))
    torch.manual_seed(7)
    theirs = cls(config).eval()
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in {id(w): w for w in theirs.parameters()}.values():
            noise = torch.randn(weight.shape, generator=draw)
            weight.copy_(weight + 0.2 * noise if weight.dim() == 1 else 1.3 * noise * weight.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return Transformer.from_pretrained(folder).eval(), theirs, ends(theirs)


def ends(theirs):
    """Two tokens that occur in some texts and not in all: as end tokens they stop some of them."""
    texts = [row[-NEW:] for ids in prompts() for row in answer(theirs, ids, [], {}).tolist()]
    counted = Counter(token for text in texts for token in set(text[2:]) if token not in (PAD, START))
    return sorted(counted, key=lambda token: abs(counted[token] - PROMPTS // 5))[:2]


def prompts():
    """Two batches of 25; a batch has one length, since transformers counts padding as text that was said."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(4, VOCAB, (PROMPTS // 2, length), generator=draw) for length in (5, 11)]


def asked(model, stop, way):
    given = {"max_new_tokens": NEW, "eos_token_id": stop or None, "pad_token_id": PAD, **way}
    return given | ({"decoder_start_token_id": START} if model.config.is_encoder_decoder else {})


def answer(theirs, ids, stop, way, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return theirs.generate(ids, do_sample=False, **asked(theirs, stop, way), **more)


def rows(ids, prompt):
    """What is new in each row, without the padding at its end."""
    out = []
    for row in ids[:, prompt:].tolist():
        while row and row[-1] == PAD:
            row.pop()
        out.append(row)
    return out


@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_those_of_transformers(pair, way):
    ours, theirs, stop = pair
    compared = ended = 0
    for ids in prompts():
        wanted = answer(theirs, ids, stop, WAYS[way])
        got = ours.generate(ids, **asked(theirs, stop, WAYS[way]))
        before = 1 if ours.encoder is not None else ids.shape[1]
        wanted, got = rows(wanted, before), rows(got, before)
        different = [place for place, (one, other) in enumerate(zip(got, wanted, strict=True)) if one != other]
        assert not different, f"{len(different)} of {len(wanted)}: {got[different[0]]} for {wanted[different[0]]}"
        compared += len(ids)
        ended += sum(len(row) < NEW for row in wanted)
    assert compared == PROMPTS
    if way not in LONG_ONES:
        assert ended, "nothing ended before its last token: stopping was not tried"


@pytest.mark.parametrize("way", ["greedy", "beams, penalty 1.0, early False", "beams, penalty 2.0, early never"])
def test_prompts_of_different_lengths_with_padding_give_those_of_transformers(pair, way):
    ours, theirs, stop = pair
    lengths = 3 + torch.arange(PROMPTS) % 7
    wide, left = int(lengths.max()), ours.encoder is None  # decoders are padded on the left, sources on the right
    places = torch.arange(wide)
    real = places >= wide - lengths[:, None] if left else places < lengths[:, None]
    ids = torch.randint(4, VOCAB, (PROMPTS, wide), generator=torch.Generator().manual_seed(3)).where(real, PAD)
    wanted = answer(theirs, ids, stop, WAYS[way], attention_mask=real.long())
    got = ours.generate(ids, attention_mask=real.long(), **asked(theirs, stop, WAYS[way]))
    before = wide if left else 1
    assert rows(got, before) == rows(wanted, before)


def test_the_scores_of_beams_are_those_of_transformers(pair):
    from monoblock.decoding.engine import Engine
    from monoblock.decoding.settings import Settings

    ours, theirs, stop = pair
    way = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.6}
    ids = prompts()[0][:5]
    wanted = answer(theirs, ids, stop, way, return_dict_in_generate=True, output_scores=True).sequences_scores
    engine = Engine(ours, capacity=64)
    settings = Settings(max_new_tokens=NEW, eos_token_id=tuple(stop), **way)
    both = ours.encoder is not None
    for row in ids.tolist():
        engine.add([START] if both else row, settings, row if both else None)
    found = [event for _ in range(NEW) for event in engine.step()]
    assert not engine.busy
    scores = [event.score for event in sorted(found, key=lambda event: (event.id, event.number))]
    assert scores == pytest.approx(wanted.tolist(), abs=1e-5)
