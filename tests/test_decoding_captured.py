"""Recorded steps, with the recording replaced by running the same thing again: what is left is all but CUDA."""

from types import SimpleNamespace

import pytest
from support import presets, toy

from monoblock.decoding import engine as engines
from monoblock.decoding.captured import Captured
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings

PROMPTS = ([5, 7, 11, 2, 3], [1, 2, 3], [9, 8, 7, 6, 5, 4, 3])


class Replayed(Captured):
    """A recording that is run each time it is replayed, in place as a real one would."""

    recordings = 0

    def _recorded(self):
        type(self).recordings += 1
        self._once()
        held = self.cache.lengths, self.tokens, [slot.keys for slot in self.cache.slots]

        def replay():
            assert held[0] is self.cache.lengths
            assert held[1] is self.tokens
            assert all(one is slot.keys for one, slot in zip(held[2], self.cache.slots, strict=True))
            self._once()

        return SimpleNamespace(replay=replay)


def engine(model, monkeypatch, recorded=True, **options):
    made = Engine(model, capacity=26, **options)
    if recorded:
        monkeypatch.setattr(engines, "Captured", Replayed)
        Replayed.recordings = 0
        made.captures = True
    return made


def texts(made, settings, prompts=PROMPTS, source=None):
    for prompt in prompts:
        made.add(prompt if source is None else [0], settings, source and prompt)
    new = {}
    while made.busy:
        for event in made.step():
            new.setdefault((event.id, event.number), []).extend(event.tokens)
    return [new[row] for row in sorted(new)]


WAYS = {
    "greedy": Settings(max_new_tokens=11),
    "sampled": Settings(max_new_tokens=11, temperature=0.9, top_k=20, seed=3),
    "ended": Settings(max_new_tokens=11, temperature=1.3, seed=5, eos_token_id=tuple(range(0, 61, 7))),
    "penalised": Settings(max_new_tokens=11, repetition_penalty=1.4),
    "several": Settings(max_new_tokens=9, temperature=1.0, seed=2, num_return_sequences=2),
    "beams": Settings(max_new_tokens=9, num_beams=3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "mistral-7b", "t5-small"])
def test_recorded_steps_give_the_tokens_of_plain_ones(name, way, monkeypatch):
    model = toy(name)
    source = True if model.encoder is not None else None
    wanted = texts(Engine(model, capacity=26), WAYS[way], source=source)
    assert texts(engine(model, monkeypatch), WAYS[way], source=source) == wanted
    assert Replayed.recordings


@pytest.mark.parametrize("burst", [1, 2, 16])
def test_how_many_steps_are_taken_at_once_changes_nothing(burst, monkeypatch):
    model = toy("gpt2")
    wanted = texts(Engine(model, capacity=26), WAYS["ended"])
    assert texts(engine(model, monkeypatch, burst=burst), WAYS["ended"]) == wanted


def test_a_recording_serves_again_when_the_shapes_are_the_same(monkeypatch):
    model = toy("gpt2")
    made = engine(model, monkeypatch)
    others = [[p + 1 for p in prompt] for prompt in PROMPTS]
    first, second = (texts(made, WAYS["greedy"], prompts) for prompts in (PROMPTS, others))
    assert Replayed.recordings == 1
    plain = Engine(model, capacity=26)
    assert [first, second] == [texts(plain, WAYS["greedy"], prompts) for prompts in (PROMPTS, others)]
    assert texts(made, WAYS["greedy"], PROMPTS[:2]) == texts(plain, WAYS["greedy"], PROMPTS[:2])
    assert Replayed.recordings == 2


def test_a_text_of_one_token_leaves_nothing_behind(monkeypatch):
    model = toy("gpt2")
    made, plain, short = engine(model, monkeypatch), Engine(model, capacity=26), Settings(max_new_tokens=1)
    for settings in (short, WAYS["greedy"], short, WAYS["sampled"]):
        assert texts(made, settings) == texts(plain, settings)


def test_a_request_that_joins_changes_nothing(monkeypatch):
    model = toy("gpt2")
    made = engine(model, monkeypatch, burst=2)
    first = made.add(PROMPTS[0], WAYS["greedy"])
    new = {first: []}
    for _ in range(3):
        for event in made.step():
            new[event.id] += event.tokens
    second = made.add(PROMPTS[1], WAYS["greedy"])
    new[second] = []
    while made.busy:
        for event in made.step():
            new[event.id] += event.tokens
    assert [new[first], new[second]] == texts(Engine(model, capacity=26), WAYS["greedy"], PROMPTS[:2])


def test_experts_are_not_recorded():
    names = presets(
        lambda config: config.decoder is not None and any(b.feedforward.experts for b in config.decoder.layers())
    )
    assert names
    assert not any(Engine(toy(name), capacity=9).captures for name in names)
    assert not Engine(toy("gpt2"), capacity=9).captures  # not on a CPU either
