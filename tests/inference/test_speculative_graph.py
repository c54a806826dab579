"""Recorded rounds of speculative decoding without a GPU: replaying runs the round again, in the same buffers."""

import copy

import pytest
import torch
from support import tiny_model

import monoblock as mb
from monoblock.inference.backends import select, speculative_graph
from monoblock.inference.backends.search.record import Call
from monoblock.inference.draft_model import DraftModel
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings
from monoblock.inference.speculative import PromptLookup

PROMPTS = ([5, 7, 11, 2, 3], [1, 2, 3], [9, 8, 7, 6, 5, 4, 3])
GREEDY = Settings(max_new_tokens=17)
ENDING = Settings(max_new_tokens=17, eos_token_id=tuple(range(0, 61, 5)))


@pytest.fixture
def recordings(monkeypatch):
    """Treat models as if they were on a GPU; return the list of recorded rounds."""
    recorded = []

    def record(run, device):
        run(), run()  # as before a graph is recorded
        recorded.append(run)
        return Call(run)

    monkeypatch.setattr(select, "supports_cuda_graph", lambda model: True)
    monkeypatch.setattr(speculative_graph, "record", record)
    return recorded


def models(name):
    """A model and three drafts: a copy with slightly different weights, one with other weights, and the model."""
    model = tiny_model(name)
    drafts = {"similar": copy.deepcopy(model), "other": copy.deepcopy(model), "same": model}
    torch.manual_seed(5)
    with torch.no_grad():
        for kind, size in (("similar", 0.05), ("other", 2.0)):
            for weight in drafts[kind].parameters():
                weight.add_(size * weight.abs().mean() * torch.randn_like(weight))
    return model, drafts


def decode(model, settings, prompts=PROMPTS, draft=None, capacity=40):
    if draft is None:
        return run(Engine(model, capacity=capacity), settings, prompts)
    model = mb.optimize(model) if isinstance(model, mb.Transformer) else model
    return run(Engine(model, capacity=capacity, proposer=draft), settings, prompts)


def run(engine, settings, prompts):
    ids = [engine.add(prompt, settings) for prompt in prompts]
    tokens = {request: [] for request in ids}
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.tokens
    return [tokens[request] for request in ids]


@pytest.mark.parametrize("settings", [GREEDY, ENDING], ids=["greedy", "ends early"])
@pytest.mark.parametrize("kind", ["similar", "other", "same"])
@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "mistral-7b", "gemma2-2b", "bloom-560m"])
def test_recorded_rounds_give_the_tokens_of_the_model_alone(name, kind, settings, recordings):
    model, drafts = models(name)
    proposer = DraftModel(mb.optimize(drafts[kind]))
    assert decode(model, settings, draft=proposer) == decode(model, settings)
    assert recordings
    assert proposer.proposed > 0
    share = proposer.accepted / proposer.proposed
    assert share >= {"similar": 0.2, "other": 0.0, "same": 0.7}[kind]  # some proposals come after the last token
    if kind == "other" and name != "gemma2-2b":  # which repeats one token whatever its weights are
        assert share < 0.5


@pytest.mark.parametrize("settings", [GREEDY, ENDING], ids=["greedy", "ends early"])
@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "mistral-7b", "gemma2-2b", "bloom-560m"])
def test_recorded_lookups_give_the_tokens_of_the_model_alone(name, settings, recordings):
    model = tiny_model(name)
    assert decode(model, settings, draft=PromptLookup(3)) == decode(model, settings)
    assert len(recordings) == 1
    more = [list(reversed(prompt)) for prompt in PROMPTS]
    assert decode(model, settings, more, draft=PromptLookup(3)) == decode(model, settings, more)
    assert decode(model, settings, draft=PromptLookup(15)) == decode(model, settings)
    assert decode(model, settings, [[3]], draft=PromptLookup(3)) == decode(model, settings, [[3]])


def test_tokens_are_looked_up_on_the_device_as_in_python():
    """Rows of few different tokens, so that tokens occur often, once or never before."""
    generator = torch.Generator().manual_seed(0)
    for max_ngram in (1, 3, 4):
        lookup = PromptLookup(5, max_ngram)
        for _ in range(40):
            lengths = torch.randint(1, 14, (3,), generator=generator)
            rows = [torch.randint(4, (int(n),), generator=generator).tolist() for n in lengths]
            rows.append([7, 1, 2])
            padded = torch.tensor([[*row, *[0] * (20 - len(row))] for row in rows])
            newest = torch.tensor([([0, *row])[-2:] for row in rows])
            proposals = speculative_graph.LookupProposals(padded, 5, max_ngram)
            found = proposals.propose(newest, torch.tensor([len(row) - 1 for row in rows]))
            assert found.tolist() == lookup.propose(rows, [], 5, None).tolist()


def test_accepted_tokens_are_looked_up_in_later_rounds():
    proposals = speculative_graph.LookupProposals(torch.tensor([[7, 8, 9, *[0] * 9]]), 2, 3)
    proposals.accept(torch.tensor([2]), torch.tensor([[4, 7, 8]]), torch.tensor([3]))
    assert proposals.tokens[0, :6].tolist() == [7, 8, 9, 4, 7, 8]
    assert proposals.propose(torch.tensor([[7, 8]]), torch.tensor([5])).tolist() == [[9, 4]]


def test_a_round_is_recorded_once_for_prompts_of_one_shape(recordings):
    model, drafts = models("gpt2")
    batches = [[[(start + row + 3 * i) % 61 for i in range(6)] for row in range(2)] for start in range(4)]
    fast, similar, other = (mb.optimize(each) for each in (model, drafts["similar"], drafts["other"]))
    for prompts in batches:
        assert decode(fast, GREEDY, prompts, DraftModel(similar)) == decode(model, GREEDY, prompts)
    assert len(recordings) == 1
    assert decode(fast, GREEDY, PROMPTS, DraftModel(similar)) == decode(model, GREEDY)
    assert decode(fast, GREEDY, PROMPTS, DraftModel(other)) == decode(model, GREEDY)
    assert len(recordings) == 3


def test_a_request_that_joins_and_one_that_is_cancelled_change_nothing(recordings):
    model, drafts = models("gpt2")
    expected = decode(model, GREEDY)
    engine = Engine(mb.optimize(model), capacity=40, proposer=DraftModel(mb.optimize(drafts["similar"])))
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:2]]
    tokens = {request: [] for request in range(1, 5)}
    steps = 0
    while engine.busy:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
        steps += 1
        if steps == 2:
            ids.append(engine.add(PROMPTS[2], GREEDY))
        elif steps == 3:
            engine.cancel(ids[0])
    assert [tokens[ids[1]], tokens[ids[2]]] == expected[1:]
    assert tokens[ids[0]] == expected[0][: len(tokens[ids[0]])]


def test_sampling_is_not_recorded(recordings):
    model, drafts = models("gpt2")
    sampled = Settings(max_new_tokens=9, temperature=0.9, seed=3)
    assert decode(model, sampled, draft=DraftModel(mb.optimize(drafts["similar"]))) == decode(model, sampled)
    assert not recordings


def test_the_end_of_the_context_is_reached(recordings):
    """Proposals beyond the last position of the context are never accepted."""
    model, drafts = models("gpt2")
    context = model.config.context
    prompts = [[3] * (context - 9), [4] * (context - 6)]
    settings = Settings(max_new_tokens=12)
    expected = decode(model, settings, prompts, capacity=context)
    assert decode(model, settings, prompts, DraftModel(mb.optimize(drafts["similar"])), capacity=context) == expected
    assert [len(row) for row in expected] == [9, 6]
