"""Values of options that cannot be right are refused in one line where they are given, before anything is decoded."""

from importlib import import_module
from typing import get_type_hints

import numpy as np
import pytest
import torch
from generate_support import IDS, gpt, translator

import monoblock as mb
from monoblock.config.schema import union_members
from monoblock.inference import sampler, settings
from monoblock.inference.speculative import DraftModel, PromptLookup

HUGE = 10**5000  # Python refuses to write such a number in decimal
TOKENS = [np.int64(3), np.array([3]), torch.tensor(3), torch.tensor([3]), "3", "", 3.5, True, {3: 4}, [[3]], -1, HUGE]
COUNTS = ["3", 2.5, True, -1, HUGE, -HUGE, np.int64(3), [3]]
SETTINGS = {
    **dict.fromkeys(("eos_token_id", "suppress_tokens", "begin_suppress_tokens"), TOKENS),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "pad_token_id", "seed"), COUNTS),
    **{key: [*COUNTS, None] for key in ("max_new_tokens", "min_new_tokens", "num_beams", "num_return_sequences")},
    **{key: ["x", torch.tensor(1.0), None, HUGE, 1j, float("nan")] for key in ("temperature", "repetition_penalty")},
    "bad_words_ids": [5, 0, "ab", [["a"]], [[np.int64(3)]], np.array([[3]]), [[]], [HUGE], {3: 4}],
    "draft": [3, ["8-bit"], np.array(["8-bit", "4-bit"]), "2-bit"],
    "early_stopping": [np.array([1, 2]), None, "soon", 2],
    "logits_processor": [5, [5], torch.tensor(3)],
}
ENGINE = {
    "max_rows": [*COUNTS, 0, None],
    "prefill_chunk": [*COUNTS, 0],
    "capacity": [*COUNTS, 0],
    "max_burst": [*COUNTS, 0, None],
    "proposer": [3, "lookup"],
    "tap": [3],
    "ensemble": [3, [3]],
}
CALL = {
    "prompt_lookup": COUNTS,
    "draft": [3, "2-bit", torch.nn.Linear(2, 2)],
    "tap": [3],
    "attention_mask": [[[1] * 5] * 2, "x"],
    "truncation": [3],
    "seed": ["x", [1], 2.5, HUGE],
}
TARGET = {
    "decoder_start_token_id": ["x", -1, HUGE, 2.5],
    "decoder_input_ids": [[[1]], "x", torch.ones(2), torch.ones(2, 2), torch.ones(1, 2, dtype=torch.long)],
}
MAKERS = {
    "Settings": (mb.Settings, SETTINGS),
    "Engine": (lambda **options: mb.Engine(gpt(), **options), ENGINE),
    "generate": (lambda **options: gpt().generate(IDS, **options), CALL),
    "translate": (lambda **options: translator().generate(IDS, **options), TARGET),
    "PromptLookup": (PromptLookup, {key: [*COUNTS, 0] for key in ("num_proposals", "max_ngram")}),
    "DraftModel": (
        lambda **options: DraftModel(**{"model": gpt(), **options}),
        {**{key: [*COUNTS, 0] for key in ("max_proposals", "max_checked")}, "model": [3, "x", torch.nn.Linear(2, 2)]},
    ),
}


@pytest.mark.parametrize(("maker", "name"), [(maker, name) for maker, (_, table) in MAKERS.items() for name in table])
def test_an_odd_value_is_an_error_of_one_line_that_names_the_option(maker, name):
    make, table = MAKERS[maker]
    for value in table[name]:
        with pytest.raises(mb.MonoblockError) as problem:
            make(**{name: value})
        assert "\n" not in str(problem.value)
        if maker in ("Settings", "PromptLookup"):
            assert name in str(problem.value)


@pytest.mark.parametrize("model", ["gpt2", 3, torch.nn.Linear(2, 2), None])
def test_an_engine_refuses_what_is_no_model(model):
    with pytest.raises(mb.InputError, match=r"what mb\.optimize"):
        mb.Engine(model)


@pytest.mark.parametrize("given", [{"max_new_tokens": 3}, 3, None])
def test_a_request_takes_settings_and_nothing_else(given):
    engine = mb.Engine(gpt())
    with pytest.raises(mb.InputError, match=r"write mb.Settings\("):
        engine.add([1], given)
    assert not engine.busy


# -- options without effect -------------------------------------------------------------------------------------------

SAMPLING = [{name: 5 if name in settings.COUNTS else 0.5} for name in settings.SAMPLING_OPTIONS]
SEARCH = [{"length_penalty": 2.0}, {"early_stopping": True}]


@pytest.mark.parametrize("option", [*SAMPLING, *SEARCH])
def test_settings_and_generate_refuse_the_same_options_without_effect(option):
    switch = {"temperature": 1.0} if option in SAMPLING else {"num_beams": 2}
    off = dict.fromkeys(switch, 0 if option in SAMPLING else 1)
    name = next(iter(switch))
    for make in (mb.Settings, lambda **options: gpt().generate(IDS, max_new_tokens=2, **options)):
        with pytest.raises(mb.InputError, match=f"write {name}=. too, or leave out {next(iter(option))}"):
            make(**option)
        make(**option, **switch)
        make(**option, **off)  # switched off in words


def test_every_filter_is_an_option_with_limits_and_without_effect_by_default():
    filters = [function.__name__ for function in (*sampler.SAMPLING_FILTERS, *sampler.HISTORY_FILTERS)]
    assert filters == ["temperature", *settings.SAMPLING_OPTIONS, *settings.HISTORY_OPTIONS]
    for name in filters:
        low, high = (settings.COUNTS.get(name) or settings.RANGES[name])[:2]
        assert low <= getattr(sampler.NEUTRAL, name) <= high
    pytest.importorskip("pydantic")
    assert {*filters} <= {*import_module("monoblock.serving.requests").CompletionBody.model_fields}


def test_every_number_has_limits():
    hints = get_type_hints(mb.Settings).items()
    numbers = [
        name for name, hint in hints if {int, float} & {*union_members(hint)} and bool not in union_members(hint)
    ]
    assert {*numbers} == {*settings.COUNTS, *settings.RANGES}


def test_the_defaults_of_settings_are_plain_numbers():
    defaults = mb.Settings()
    assert (defaults.temperature, defaults.num_beams, repr(defaults.temperature)) == (0.0, 1, "0.0")
    assert defaults == mb.Settings(temperature=0.0, num_beams=1)
