"""The cost of decoding: with a cache every token is run once, without it every step runs all of them (66.8 ×)."""

import pytest
import torch
from support import build_model

import monoblock as mb
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings
from monoblock.inference.speculative import DraftModel

PROMPT, NEW = 50, 100


def build():
    return build_model(mb.gpt(vocab=17, width=8, depth=1, heads=2, context=163))


def count_positions(model, **options):
    """The token positions that a generation runs, and the passes it takes."""
    counts = []
    hook = model.input.register_forward_hook(lambda module, args, out: counts.append(out.shape[0] * out.shape[1]))
    ids = torch.randint(1, 17, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    try:
        assert model.generate(ids, max_new_tokens=NEW, **options).shape == (1, PROMPT + NEW)
    finally:
        hook.remove()
    return sum(counts), len(counts)


def test_a_prompt_of_50_and_100_new_tokens_are_149_positions_with_the_cache_and_9950_without():
    model = build()
    assert count_positions(model) == (PROMPT + NEW - 1, NEW) == (149, 100)
    assert count_positions(model, use_cache=False) == (sum(range(PROMPT, PROMPT + NEW)), NEW) == (9950, 100)
    assert round(9950 / 149, 1) == 66.8


def test_beams_share_one_pass_over_the_prompt():
    positions, passes = count_positions(build(), num_beams=4)
    assert (positions, passes) == (PROMPT + 4 * (NEW - 1), NEW)


@pytest.mark.parametrize("num_proposals", [1, 4])
def test_a_draft_that_is_always_right_saves_passes(num_proposals):
    model = build()
    engine, lengths = Engine(model, proposer=DraftModel(build(), num_proposals)), []
    engine.add([1, 2, 3], Settings(max_new_tokens=1 + 5 * (num_proposals + 1)))
    hook = model.input.register_forward_hook(lambda module, args, out: lengths.append(out.shape[1]))
    while engine.busy:
        engine.step()
    hook.remove()
    assert lengths == [3, *[num_proposals + 1] * 5]


@torch.no_grad()
def simulate_speculation(model, draft, prompt, max_new_tokens, max_proposals):
    """How many tokens each pass gains, computed by full passes: the accepted proposals and one more.

    The next proposal has twice as many tokens as were accepted and one more, up to the maximum.
    """
    best_token = lambda model, tokens: int(model(torch.tensor([tokens]))[0, -1].argmax())
    tokens, gains, size = [*prompt, best_token(model, prompt)], [1], max_proposals
    while len(tokens) - len(prompt) < max_new_tokens:
        proposed, accepted = list(tokens), 0
        for _ in range(size):
            proposed.append(best_token(draft, proposed))
        while accepted < size and proposed[len(tokens) + accepted] == best_token(
            model, proposed[: len(tokens) + accepted]
        ):
            accepted += 1
        new = [*proposed[len(tokens) :][:accepted], best_token(model, proposed[: len(tokens) + accepted])]
        new = new[: max_new_tokens - (len(tokens) - len(prompt))]
        gains.append(len(new))
        tokens += new
        size = min(max_proposals, 2 * accepted + 1)
    return gains


def test_a_draft_that_is_sometimes_right_saves_as_many_passes_as_it_is_right():
    """Its cache drops rejected proposals; otherwise the next ones would continue tokens that are not in the text."""
    model, draft, max_proposals = build(), build(), 3
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.35 * weight.std() * torch.randn(weight.shape, generator=generator))
    engine = Engine(model, proposer=DraftModel(draft, max_proposals))
    engine.add([1, 2, 3], Settings(max_new_tokens=60))
    gains = []
    while engine.busy:
        gains.append(sum(len(output.tokens) for output in engine.step()))
    assert gains == simulate_speculation(model, draft, [1, 2, 3], 60, max_proposals)
    assert {1, max_proposals + 1} <= set(gains[1:]), "never wrong or never right: nothing was tested"
