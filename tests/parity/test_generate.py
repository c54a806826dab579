"""The same tokens as `generate` of transformers for every prompt, greedy and with beams, in four families."""

import itertools
import warnings
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from monoblock.model import Transformer  # noqa: E402

VOCAB, PROMPTS, MAX_NEW = 61, 50, 13
START_ID, PAD_ID = 3, 1
SPECIAL_IDS = {"bos_token_id": START_ID, "eos_token_id": 2, "pad_token_id": PAD_ID, "vocab_size": VOCAB}
CONTEXT_SIZE = {"max_position_embeddings": 64}
ENCODER_DECODER = {"decoder_start_token_id": START_ID, "is_encoder_decoder": True}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {"n_positions": 64, "n_embd": 36, "n_layer": 2, "n_head": 3}),
    "llama": (
        "LlamaForCausalLM",
        CONTEXT_SIZE | {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
         "intermediate_size": 46},
    ),
    "t5": ("T5ForConditionalGeneration", ENCODER_DECODER | {"d_model": 36, "num_layers": 2, "num_heads": 3, "d_kv": 12,
                                                 "d_ff": 46}),
    "bart": (
        "BartForConditionalGeneration",
        ENCODER_DECODER | CONTEXT_SIZE | {"d_model": 36, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 46, "decoder_ffn_dim": 46,
         "forced_eos_token_id": None},
    ),
}  # fmt: skip
BEAMS = {
    f"beams, penalty {penalty}, early {early}": {"num_beams": 4, "length_penalty": penalty, "early_stopping": early}
    for penalty, early in itertools.product((0.6, 1.0, 2.0), (False, True, "never"))
}
FAVORS_LENGTH = [
    name for name in BEAMS if "penalty 2.0" in name
]  # may prefer the longest text, which does not end early
PENALTIES = {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2}
SETTINGS = {
    "greedy": {},
    "greedy, no 3-gram twice": {"no_repeat_ngram_size": 3},
    "greedy, repetition 1.2": {"repetition_penalty": 1.2},
    **BEAMS,
    "beams, no 3-gram twice": {"num_beams": 4, "no_repeat_ngram_size": 3},
    "beams, repetition 1.2": {"num_beams": 4, "repetition_penalty": 1.2},
    "beams, both, n-best": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.6} | PENALTIES,
    "beams, at least 5": {"num_beams": 4, "min_new_tokens": 5, "bad_words_ids": [[11], [13, 17]]},
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """Load the same weights in both libraries, large enough that texts differ and some end early."""
    class_name, sizes = MODELS[request.param]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    cls = getattr(transformers, class_name)
    config = cls.config_class(**(SPECIAL_IDS | sizes))
    torch.manual_seed(7)
    theirs = cls(config).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in {id(w): w for w in theirs.parameters()}.values():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight + 0.2 * noise if weight.dim() == 1 else 1.3 * noise * weight.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return Transformer.from_pretrained(folder).eval(), theirs, choose_eos_ids(theirs)


def choose_eos_ids(theirs):
    """Choose two tokens that occur in some texts: as end-of-sequence tokens they stop some of them."""
    texts = [row[-MAX_NEW:] for ids in prompts() for row in generate_theirs(theirs, ids, [], {}).tolist()]
    counts = Counter(token for text in texts for token in set(text[2:]) if token not in (PAD_ID, START_ID))
    return sorted(counts, key=lambda token: abs(counts[token] - PROMPTS // 5))[:2]


def prompts():
    """Draw two batches of prompts of one length each, because transformers counts padding as generated text."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, VOCAB, (PROMPTS // 2, length), generator=generator) for length in (5, 11)]


def generate_options(model, eos_ids, settings):
    options = {"max_new_tokens": MAX_NEW, "eos_token_id": eos_ids or None, "pad_token_id": PAD_ID, **settings}
    return options | ({"decoder_start_token_id": START_ID} if model.config.is_encoder_decoder else {})


def generate_theirs(theirs, ids, eos_ids, settings, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return theirs.generate(ids, do_sample=False, **generate_options(theirs, eos_ids, settings), **options)


def new_tokens(ids, start):
    """Return the new tokens of each row, without padding at the end."""
    result = []
    for row in ids[:, start:].tolist():
        while row and row[-1] == PAD_ID:
            row.pop()
        result.append(row)
    return result


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_equal_those_of_transformers(pair, name):
    ours, theirs, eos_ids = pair
    compared = ended = 0
    for ids in prompts():
        expected = generate_theirs(theirs, ids, eos_ids, SETTINGS[name])
        result = ours.generate(ids, **generate_options(theirs, eos_ids, SETTINGS[name]))
        start = 1 if ours.encoder is not None else ids.shape[1]
        expected, result = new_tokens(expected, start), new_tokens(result, start)
        different = [index for index, (a, b) in enumerate(zip(result, expected, strict=True)) if a != b]
        assert not different, (
            f"{len(different)} of {len(expected)}: {result[different[0]]} for {expected[different[0]]}"
        )
        compared += len(ids)
        ended += sum(len(row) < MAX_NEW for row in expected)
    assert compared == PROMPTS
    if name not in FAVORS_LENGTH:
        assert ended, "no text ended early: stopping was not tested"


@pytest.mark.parametrize("name", ["greedy", "beams, penalty 1.0, early False", "beams, penalty 2.0, early never"])
def test_padded_prompts_give_the_tokens_of_transformers(pair, name):
    ours, theirs, eos_ids = pair
    lengths = 3 + torch.arange(PROMPTS) % 7
    width, is_left_padded = (
        int(lengths.max()),
        ours.encoder is None,
    )  # decoders are padded on the left, sources on the right
    positions = torch.arange(width)
    valid = positions >= width - lengths[:, None] if is_left_padded else positions < lengths[:, None]
    ids = torch.randint(4, VOCAB, (PROMPTS, width), generator=torch.Generator().manual_seed(3)).where(valid, PAD_ID)
    expected = generate_theirs(theirs, ids, eos_ids, SETTINGS[name], attention_mask=valid.long())
    result = ours.generate(ids, attention_mask=valid.long(), **generate_options(theirs, eos_ids, SETTINGS[name]))
    start = width if is_left_padded else 1
    assert new_tokens(result, start) == new_tokens(expected, start)


def test_the_beam_scores_equal_those_of_transformers(pair):
    from monoblock.inference.engine import Engine
    from monoblock.inference.settings import Settings

    ours, theirs, eos_ids = pair
    options = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.6}
    ids = prompts()[0][:5]
    expected = generate_theirs(
        theirs, ids, eos_ids, options, return_dict_in_generate=True, output_scores=True
    ).sequences_scores
    engine = Engine(ours, capacity=64)
    settings = Settings(max_new_tokens=MAX_NEW, eos_token_id=tuple(eos_ids), **options)
    has_encoder = ours.encoder is not None
    for row in ids.tolist():
        engine.add([START_ID] if has_encoder else row, settings, row if has_encoder else None)
    events = [event for _ in range(MAX_NEW) for event in engine.step()]
    assert not engine.busy
    scores = [event.score for event in sorted(events, key=lambda event: (event.request_id, event.sequence_index))]
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
