"""Seeds of a batch: prompt n is sampled with seed + n, as it is alone; a list gives each prompt its own seed."""

import pytest
import torch

import monoblock as mb

SAMPLED = {"max_new_tokens": 12, "temperature": 1.3}


@pytest.fixture(params=["gpt", "t5"])
def model(request):
    torch.manual_seed(3)
    sizes = {"vocab": 61, "width": 32, "depth": 2, "heads": 4, "context": 64}
    return mb.Transformer(getattr(mb, request.param)(**sizes)).eval()


def new_tokens(model, ids, **options):
    return model.generate(ids, **SAMPLED, **options)[:, -12:].tolist()


def test_copies_of_a_prompt_differ_and_each_equals_the_prompt_alone(model):
    prompt = torch.randint(61, (1, 7))
    rows = new_tokens(model, prompt.expand(4, -1), seed=5)
    assert len({tuple(row) for row in rows}) == 4
    assert rows == [new_tokens(model, prompt, seed=5 + number)[0] for number in range(4)]


def test_a_list_gives_each_prompt_its_own_seed(model):
    prompts = torch.randint(61, (3, 7))
    rows = new_tokens(model, prompts, seed=[9, 2, 9])
    assert rows == [new_tokens(model, prompts[n : n + 1], seed=seed)[0] for n, seed in enumerate([9, 2, 9])]


def test_a_stream_has_the_tokens_of_generate(model):
    prompts = torch.randint(61, (3, 7))
    streamed = torch.stack(list(model.stream(prompts, seed=4, **SAMPLED)), 1).tolist()
    assert streamed == new_tokens(model, prompts, seed=4)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        ([1, 2], "one for each of 3 prompts"),
        ("7", "neither a whole number"),
        (-1, "seed=-1 is not valid"),
        (1.5, "seed=1.5"),
    ],
)
def test_a_seed_that_cannot_be_used_is_one_line(model, seed, message):
    with pytest.raises(mb.InputError, match=message):
        model.generate(torch.zeros(3, 4, dtype=torch.int64), seed=seed, **SAMPLED)
