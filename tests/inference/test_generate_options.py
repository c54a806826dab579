"""Options of `generate` beyond choosing tokens: logits processors, token scores, truncation, options without effect."""

import itertools

import pytest
import torch
from generate_support import IDS, NEW, gpt, translator
from support import tiny_model

import monoblock as mb
from monoblock.errors import InputError
from monoblock.inference.settings import COUNTS, SAMPLING_OPTIONS, Settings
from monoblock.inference.speculative import PromptLookup


def forbid_even_tokens(ids, logits):
    logits = logits.clone()
    logits[:, ::2] = -torch.inf
    return logits


# -- logits processors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 5}, {"use_cache": False}, {"prompt_lookup": 3}]
)
def test_a_logits_processor_changes_the_tokens_that_can_be_chosen(options, kernels):
    new = gpt().generate(IDS, max_new_tokens=NEW, logits_processor=[forbid_even_tokens], **options)[:, IDS.shape[1] :]
    assert (new % 2 == 1).all()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_logits_processors_of_transformers_give_the_texts_of_the_same_options(options):
    theirs = pytest.importorskip("transformers").generation.logits_process
    processors = [theirs.RepetitionPenaltyLogitsProcessor(1.7), theirs.NoRepeatNGramLogitsProcessor(2)]
    ours = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}
    wanted = gpt().generate(IDS, max_new_tokens=NEW, **ours, **options)
    assert torch.equal(gpt().generate(IDS, max_new_tokens=NEW, logits_processor=processors, **options), wanted)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_processor_that_leaves_no_token_is_an_error(value):
    with pytest.raises(InputError, match="a logit is NaN or no token is allowed"):
        gpt().generate(IDS, logits_processor=[lambda ids, logits: torch.full_like(logits, value)])


def test_a_model_whose_logits_are_nan_is_an_error():
    model = gpt()
    with torch.no_grad():
        model.decoder.blocks[0].feedforward.up.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="the logits of this model are NaN"):
        model.generate(IDS)


@pytest.mark.parametrize(("name", "hint"), [("do_sample", "temperature=1.0"), ("max_length", "max_new_tokens")])
def test_a_name_of_another_library_is_answered_with_ours(name, hint):
    with pytest.raises(InputError, match=f"generate has no option '{name}'; write {hint}"):
        gpt().generate(IDS, **{name: 5})


def test_a_processor_sees_the_tokens_of_its_own_row():
    seen = []

    def record(ids, logits):
        seen.append(ids.tolist())
        return logits

    out = gpt().generate(IDS, max_new_tokens=3, logits_processor=record).tolist()
    assert seen == [[row[:length]] for length in (5, 6, 7) for row in out]


def test_a_processor_that_fails_ends_its_own_request_only():
    model = gpt()
    engine = mb.Engine(model)
    bad = engine.add([5, 7], Settings(max_new_tokens=NEW, logits_processor=(lambda ids, logits: logits[:, :3],)))
    good = engine.add([5, 7, 11], Settings(max_new_tokens=NEW))
    tokens, last = [], {}
    while engine.busy:
        for output in engine.step():
            tokens += output.tokens if output.request_id == good else ()
            last[output.request_id] = output
    assert last[bad].finish_reason == "error"
    assert "returned [1, 3]" in str(last[bad].error)
    assert tokens == model.generate(torch.tensor([[5, 7, 11]]), max_new_tokens=NEW)[0, 3:].tolist()
    with pytest.raises(InputError, match="returned NoneType"):
        model.generate(IDS, logits_processor=lambda ids, logits: None)
    with pytest.raises(InputError, match="must be a function"):
        model.generate(IDS, logits_processor=[3])


@pytest.mark.parametrize("proposer", [None, PromptLookup(3)], ids=["alone", "with proposals"])
def test_a_request_of_several_samples_ends_with_the_one_that_fails(proposer):
    """None of its samples gives another token after the error."""
    calls = itertools.count()

    def fail_at_the_sixth(ids, logits):
        if next(calls) == 5:
            raise ValueError("the sixth call")
        return logits

    engine = mb.Engine(gpt(), proposer=proposer)
    options = {"temperature": 0.9, "seed": 1, "num_return_sequences": 2}
    engine.add([5, 7, 5, 7, 5], Settings(max_new_tokens=NEW, logits_processor=(fail_at_the_sixth,), **options))
    outputs = [output for _ in range(3 * NEW) for output in engine.step()]
    ended = [index for index, output in enumerate(outputs) if output.finish_reason == "error"]
    assert len(ended) == 2
    assert not any(output.tokens for output in outputs[ended[0] :])
    assert not engine.busy
    assert engine.pages.num_in_use == 0


# -- token scores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"temperature": 0.7, "top_k": 5, "seed": 1, "num_return_sequences": 2}]
)
def test_scores_are_the_log_probabilities_of_the_new_tokens(options):
    model = gpt()
    ids, scores = model.generate(IDS, max_new_tokens=NEW, return_scores=True, eos_token_id=2, **options)
    assert torch.equal(ids, model.generate(IDS, max_new_tokens=NEW, eos_token_id=2, **options))
    assert scores.shape == (len(ids), ids.shape[1] - IDS.shape[1])
    for row, row_scores in zip(ids, scores, strict=True):
        with torch.no_grad():
            log_probs = model.double()(row[None])[0].log_softmax(-1)
        new = row[5:].tolist()
        length = new.index(2) + 1 if 2 in new else len(new)
        wanted = [float(log_probs[4 + step, token]) for step, token in enumerate(new[:length])]
        torch.testing.assert_close(row_scores.tolist(), wanted + [0.0] * (len(new) - length), atol=1e-5, rtol=0)
        model.float()


def test_the_scores_of_a_beam_search_add_up_to_the_score_of_its_hypothesis():
    model, source = translator(), IDS
    ids, scores = model.generate(source, max_new_tokens=NEW, num_beams=4, length_penalty=0.5, return_scores=True)
    engine = mb.Engine(model)
    requests = [
        engine.add([0], Settings(max_new_tokens=NEW, num_beams=4, length_penalty=0.5), row) for row in source.tolist()
    ]
    found = {output.request_id: output.score for _ in range(NEW + 1) for output in engine.step()}
    assert ids.shape == (2, NEW + 1)
    wanted = [found[request] * NEW**0.5 for request in requests]
    torch.testing.assert_close(scores.sum(1), torch.tensor(wanted), atol=1e-4, rtol=0)


# -- truncation -----------------------------------------------------------------------------------------------------


def test_truncation_continues_the_last_tokens_of_a_prompt_that_is_too_long():
    model = gpt()  # a context of 41 tokens
    long = torch.arange(60)[None] % 31
    with pytest.raises(InputError, match="leaves no room"):
        model.generate(long, max_new_tokens=NEW)
    out = model.generate(long, max_new_tokens=NEW, truncation="left")
    kept = model.generate(long[:, -(41 - NEW) :], max_new_tokens=NEW)
    assert torch.equal(out[:, :60], long)
    assert torch.equal(out[:, 60:], kept[:, -NEW:])
    assert model.generate(long, max_new_tokens=60, truncation="left").shape[1] == 60 + 21  # half the context is kept
    short = model.generate(IDS, max_new_tokens=NEW, truncation="left")
    assert torch.equal(short, model.generate(IDS, max_new_tokens=NEW))


def test_truncation_of_a_source_and_other_sides_are_refused():
    with pytest.raises(InputError, match="write 'left'"):
        gpt().generate(IDS, truncation="right")
    with pytest.raises(InputError, match="decoder-only"):
        translator().generate(IDS, truncation="left")


# -- options without effect -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{name: 5 if name in COUNTS else 0.5} for name in SAMPLING_OPTIONS])
def test_a_sampling_option_without_a_temperature_is_refused(option):
    with pytest.raises(InputError, match="write temperature=1 too"):
        gpt().generate(IDS, **option)
    greedy = gpt().generate(IDS, max_new_tokens=NEW, temperature=0, **option)  # greedy decoding is asked for
    assert torch.equal(greedy, gpt().generate(IDS, max_new_tokens=NEW))


@pytest.mark.parametrize("option", [{"length_penalty": 2.0}, {"early_stopping": True}])
def test_an_option_of_beam_search_without_beams_is_refused(option):
    with pytest.raises(InputError, match="write num_beams=4 too"):
        gpt().generate(IDS, **option)
    assert gpt().generate(IDS, max_new_tokens=NEW, num_beams=2, **option).shape[1] > IDS.shape[1]


# -- prompts as lists of token ids ------------------------------------------------------------------------------------

ROWS = [[5, 7], [5, 7, 11, 2, 3], [9]]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "num_return_sequences": 2, "seed": [3, 5, 7]}])
@pytest.mark.parametrize("optimized", [False, True])
def test_lists_of_different_lengths_give_what_each_gives_alone(options, optimized):
    model = tiny_model("gpt2")
    decoder = mb.optimize(model) if optimized else model
    result = decoder.generate(ROWS, max_new_tokens=7, pad_token_id=1, return_scores=True, **options)
    count, seeds = options.get("num_return_sequences", 1), options.get("seed", [None] * 3)
    assert result.ids.shape == (3 * count, 12)
    for number, (row, seed) in enumerate(zip(ROWS, seeds, strict=True)):
        own = {**options, "seed": seed} if seed is not None else options
        alone = model.generate(torch.tensor([row]), max_new_tokens=7, return_scores=True, **own)
        several = slice(number * count, (number + 1) * count)
        assert torch.equal(result.ids[several, : len(row) + 7], alone.ids)
        assert (result.ids[several, len(row) + 7 :] == 1).all()
        torch.testing.assert_close(result.scores[several], alone.scores)


def test_sources_and_targets_may_be_lists():
    model = tiny_model("t5-small")
    found = model.generate(ROWS, decoder_input_ids=[[0, 4], [0], [0, 3, 2]], max_new_tokens=5, pad_token_id=1)
    for row, start, tokens in zip(ROWS, [[0, 4], [0], [0, 3, 2]], found, strict=True):
        alone = model.generate(torch.tensor([row]), decoder_input_ids=torch.tensor([start]), max_new_tokens=5)
        assert torch.equal(tokens[: alone.shape[1]], alone[0])
        assert (tokens[alone.shape[1] :] == 1).all()


@pytest.mark.parametrize("rows", [[], [[]], "ab", [[1.5]], [5, 7], None, 3, [[1, 99]]])
def test_other_prompts_are_an_error_of_one_line(rows):
    with pytest.raises(mb.InputError):
        tiny_model("gpt2").generate(rows)
    with pytest.raises(mb.InputError, match="leave out attention_mask"):
        tiny_model("gpt2").generate([[5]], attention_mask=torch.ones(1, 1))
