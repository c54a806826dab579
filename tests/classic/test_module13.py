"""The course module's calls give the shapes and counts that it shows, and compute what PyTorch's modules compute."""

import pytest
import torch
import torch.nn.functional as F

import monoblock as mb
from monoblock.classic.module13 import GPT, MLP, LayerNorm, TransformerBlock, create_causal_mask
from monoblock.errors import InputError


def test_the_causal_mask_of_four_tokens():
    mask = create_causal_mask(4)
    assert (mask.shape, mask.dtype) == ((1, 4, 4), torch.float32)
    assert mask[0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_layer_norm_has_gamma_and_beta_and_normalizes_the_last_axis():
    norm, x = LayerNorm(12), 5 + 3 * torch.randn(2, 7, 12)
    assert norm.parameters() == [norm.gamma, norm.beta]
    assert (norm.gamma == 1).all()
    assert (norm.beta == 0).all()
    out = norm.forward(x)
    torch.testing.assert_close(out.mean(-1), torch.zeros(2, 7), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var(-1, correction=0), torch.ones(2, 7), atol=1e-4, rtol=0)


def test_layer_norm_of_equal_features_is_finite():
    assert LayerNorm(4)(torch.full((1, 4), 3.0)).tolist() == [[0, 0, 0, 0]]


def test_the_mlp_is_four_times_as_wide_inside():
    mlp = MLP(512)
    counts = [p.numel() for p in mlp.parameters()]
    assert sum(counts[:2]) == 512 * 2048 + 2048 == 1_050_624
    assert sum(counts[2:]) == 2048 * 512 + 512 == 1_049_088
    assert sum(p.numel() for p in MLP(8, hidden_dim=5).parameters()) == 2 * 8 * 5 + 5 + 8


def test_dropout_is_applied_in_training_only():
    mlp, x = MLP(8, dropout_prob=0.5), torch.randn(2, 3, 8)
    assert not torch.equal(mlp(x), mlp(x))
    assert torch.equal(mlp.eval()(x), mlp(x))


def test_a_mask_for_each_row_of_a_batch():
    torch.manual_seed(0)
    block, x = TransformerBlock(embed_dim=12, num_heads=3).eval(), torch.randn(2, 7, 12)
    masks = torch.cat((create_causal_mask(7), torch.ones(1, 7, 7)))
    rows = [block.forward(x[row : row + 1], masks[row : row + 1]) for row in range(2)]
    torch.testing.assert_close(block(x, masks), torch.cat(rows), atol=1e-5, rtol=0)
    torch.testing.assert_close(block(x), torch.cat((block(x[:1]), rows[1])), atol=1e-5, rtol=0)


def test_the_width_of_the_mlp_of_a_block():
    assert TransformerBlock(8, 2, mlp_ratio=3).config.feedforward.hidden == 24
    assert TransformerBlock(8, 2, ff_dim=5).config.feedforward.hidden == 5


def test_the_parameters_of_every_class_are_a_list():
    model = GPT(23, 12, 2, 3, 16)
    parts = [part for part in model.modules() if type(part).__module__ == "monoblock.classic.module13"]
    kinds = {"GPT", "TransformerBlock", "MultiHeadAttention", "LayerNorm", "MLP", "Linear", "Embedding"}
    assert {type(part).__name__ for part in parts} == kinds
    assert all(part.parameters() == [weight for _, weight in part.named_parameters()] for part in parts)
    assert all(isinstance(part.parameters(), list) for part in parts)


def test_the_block_of_table_6_has_3_2_million_parameters():
    assert sum(p.numel() for p in TransformerBlock(512, 8).parameters()) == 1_048_576 + 2_099_712 + 2 * 1_024


def test_the_gpt_has_64_453_632_parameters():
    """The course says 60 M and 64 M."""
    with torch.device("meta"):
        model = GPT(50_000, 512, 12, 8, 2048)
    assert isinstance(model.parameters(), list)
    assert sum(p.numel() for p in model.parameters()) == 64_453_632


def test_generate_samples_at_temperature_one_and_keeps_the_prompt():
    torch.manual_seed(2)
    model, prompt = GPT(50, 16, 1, 2, 64), torch.tensor([[3, 5, 7]])
    samples = {tuple(model.generate(prompt, max_new_tokens=5)[0].tolist()) for _ in range(5)}
    assert len(samples) > 1
    assert {len(sample) for sample in samples} == {8}
    assert {sample[:3] for sample in samples} == {(3, 5, 7)}
    assert model.generate(prompt).shape == (1, 53)  # 50 new tokens by default
    greedy = model.to_monoblock().generate(prompt, max_new_tokens=5)
    assert torch.equal(model.generate(prompt, 5, temperature=0.0), greedy)


def test_more_tokens_than_the_model_has_positions_are_refused():
    model, prompt = GPT(23, 12, 1, 3, max_seq_len=16), torch.tensor([[3, 5, 7]])
    with pytest.raises(InputError, match=r"3 tokens .* max_new_tokens=30 exceed the 16 positions .* max_new_tokens=13"):
        model.generate(prompt, max_new_tokens=30)
    assert model.generate(prompt, max_new_tokens=13).shape == (1, 16)
    with pytest.raises(InputError, match="a prompt of 16 tokens leaves no room"):
        model.generate(torch.ones(1, 16, dtype=torch.long), max_new_tokens=1)
    padded, mask = torch.tensor([[0, 0, 3], [5, 7, 2]]), torch.tensor([[0, 0, 1], [0, 1, 1]])
    assert model.generate(padded, 14, attention_mask=mask).shape == (2, 17)
    long = torch.ones(1, 16, dtype=torch.long)
    assert model.generate(long, max_new_tokens=5, truncation="left").shape[1] > 16


def test_frequencies_of_samples_are_the_probabilities_of_the_model():
    torch.manual_seed(3)
    model = GPT(6, 16, 1, 2, 8).eval()
    with torch.no_grad():
        model.token_embedding.weight.mul_(20)
    prompt = torch.tensor([[1, 2]])
    drawn = model.generate(prompt, 1, seed=0, num_return_sequences=1000)[:, -1]
    expected = model(prompt)[0, -1].softmax(-1)
    assert expected.max() < 0.95
    torch.testing.assert_close(drawn.bincount(minlength=6) / 1000, expected, atol=0.05, rtol=0)


def test_a_step_of_training_lowers_the_loss():
    torch.manual_seed(4)
    model, tokens = GPT(23, 24, 2, 3, 16), torch.randint(23, (4, 16))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(8):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "tool", [mb.diagnose, lambda model: mb.trace(model, torch.tensor([[1, 2, 3]]))], ids=["doctor", "trace"]
)
def test_the_tools_of_monoblock_take_a_model_whose_parameters_are_a_list(tool):
    assert tool(GPT(23, 12, 1, 3, 16)) is not None
