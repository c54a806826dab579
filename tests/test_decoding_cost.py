"""What decoding costs, counted: the cache reads each token once, without it every step reads everything (66.8 ×)."""

import pytest
import torch
from support import build

import monoblock as mb
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings
from monoblock.decoding.speculative import Draft

PROMPT, NEW = 50, 100


def model():
    return build(mb.gpt(vocab=17, width=8, depth=1, heads=2, context=163))


def positions(net, **options):
    """Token positions that go into the first block while a text is continued, and the passes they took."""
    counted = []
    hook = net.input.register_forward_hook(lambda module, given, out: counted.append(out.shape[0] * out.shape[1]))
    ids = torch.randint(1, 17, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    try:
        assert net.generate(ids, max_new_tokens=NEW, **options).shape == (1, PROMPT + NEW)
    finally:
        hook.remove()
    return sum(counted), len(counted)


def test_a_prompt_of_50_and_100_new_tokens_are_149_positions_with_the_cache_and_9950_without():
    net = model()
    assert positions(net) == (PROMPT + NEW - 1, NEW) == (149, 100)
    assert positions(net, use_cache=False) == (sum(range(PROMPT, PROMPT + NEW)), NEW) == (9950, 100)
    assert round(9950 / 149, 1) == 66.8


def test_beams_read_the_prompt_once():
    read, passes = positions(model(), num_beams=4)
    assert (read, passes) == (PROMPT + 4 * (NEW - 1), NEW)


@pytest.mark.parametrize("proposed", [1, 4])
def test_a_draft_that_is_always_right_saves_passes(proposed):
    net = model()
    engine, counted = Engine(net, proposer=Draft(model(), proposed)), []
    engine.add([1, 2, 3], Settings(max_new_tokens=1 + 5 * (proposed + 1)))
    hook = net.input.register_forward_hook(lambda module, given, out: counted.append(out.shape[1]))
    while engine.busy:
        engine.step()
    hook.remove()
    assert counted == [3, *[proposed + 1] * 5]


@torch.no_grad()
def simulated(net, other, prompt, new, proposed):
    """How many tokens each pass brings, by whole passes: as many proposals as are right, and one more.

    The next time twice as many are proposed as were right, and one more, but not more than may be.
    """
    greedy = lambda model, text: int(model(torch.tensor([text]))[0, -1].argmax())
    text, brought, size = [*prompt, greedy(net, prompt)], [1], proposed
    while len(text) - len(prompt) < new:
        ahead, right = list(text), 0
        for _ in range(size):
            ahead.append(greedy(other, ahead))
        while right < size and ahead[len(text) + right] == greedy(net, ahead[: len(text) + right]):
            right += 1
        said = [*ahead[len(text) : len(text) + right], greedy(net, ahead[: len(text) + right])]
        said = said[: new - (len(text) - len(prompt))]
        brought.append(len(said))
        text += said
        size = min(proposed, 2 * right + 1)
    return brought


def test_a_draft_that_is_sometimes_right_saves_as_many_passes_as_it_is_right():
    """What it ran ahead in vain is taken back, or its next proposals would follow from words never said."""
    net, other, proposed = model(), model(), 3
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.35 * weight.std() * torch.randn(weight.shape, generator=draw))
    engine = Engine(net, proposer=Draft(other, proposed))
    engine.add([1, 2, 3], Settings(max_new_tokens=60))
    brought = []
    while engine.busy:
        brought.append(len(engine.step()))
    assert brought == simulated(net, other, [1, 2, 3], 60, proposed)
    assert {1, proposed + 1} <= set(brought[1:]), "never wrong or never right: nothing was tried"
