"""The course module's calls give the shapes and counts that it shows, and compute what PyTorch's modules compute."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monoblock as mb
from monoblock.classic.module13 import GPT, MLP, LayerNorm, TransformerBlock, create_causal_mask


class PlainNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta, 1e-5)


class PlainAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, mask):
        parts = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(*parts, attn_mask=mask.bool())
        return self.out_proj(out.transpose(1, 2).flatten(2))


class PlainMLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.linear2(F.gelu(self.linear1(x)))


class PlainBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1, self.ln2 = PlainNorm(width), PlainNorm(width)
        self.attention, self.mlp = PlainAttention(width, heads), PlainMLP(width, 4 * width)

    def forward(self, x, mask):
        x = x + self.attention(self.ln1(x), mask)
        return x + self.mlp(self.ln2(x))


class PlainGPT(nn.Module):
    def __init__(self, vocab, width, layers, heads, context):
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.ln_f = PlainNorm(width)

    def forward(self, ids):
        x = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, torch.ones(ids.shape[1], ids.shape[1]).tril())
        return self.ln_f(x) @ self.token_embedding.weight.T


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
    reference = PlainNorm(12)
    norm.load_state_dict(reference.state_dict())
    torch.testing.assert_close(norm(x), reference(x), atol=1e-5, rtol=0)


def test_layer_norm_of_equal_features_is_finite():
    assert LayerNorm(4)(torch.full((1, 4), 3.0)).tolist() == [[0, 0, 0, 0]]


def test_the_mlp_is_four_times_as_wide_inside():
    mlp = MLP(512)
    counts = [p.numel() for p in mlp.parameters()]
    assert sum(counts[:2]) == 512 * 2048 + 2048 == 1_050_624
    assert sum(counts[2:]) == 2048 * 512 + 512 == 1_049_088
    assert sum(p.numel() for p in MLP(8, hidden_dim=5).parameters()) == 2 * 8 * 5 + 5 + 8


def test_the_mlp_takes_the_weights_of_the_listing():
    mlp, reference, x = MLP(8).eval(), PlainMLP(8, 32), torch.randn(2, 3, 8)
    mlp.load_state_dict(reference.state_dict())
    torch.testing.assert_close(mlp.forward(x), reference(x), atol=1e-5, rtol=0)


def test_dropout_is_applied_in_training_only():
    mlp, x = MLP(8, dropout_prob=0.5), torch.randn(2, 3, 8)
    assert not torch.equal(mlp(x), mlp(x))
    assert torch.equal(mlp.eval()(x), mlp(x))


def test_the_block_takes_the_weights_of_the_listing_and_gives_its_output():
    torch.manual_seed(0)
    block, reference, x = TransformerBlock(embed_dim=12, num_heads=3).eval(), PlainBlock(12, 3), torch.randn(2, 7, 12)
    block.load_state_dict(reference.state_dict())
    for mask in (create_causal_mask(7), torch.ones(1, 7, 7)):
        torch.testing.assert_close(block.forward(x, mask), reference(x, mask), atol=1e-5, rtol=0)
    torch.testing.assert_close(block(x), reference(x, torch.ones(7, 7)), atol=1e-5, rtol=0)
    masks = torch.cat((create_causal_mask(7), torch.ones(1, 7, 7)))  # one for each row of the batch
    rows = [reference(x[row : row + 1], masks[row]) for row in range(2)]
    torch.testing.assert_close(block(x, masks), torch.cat(rows), atol=1e-5, rtol=0)


def test_the_width_of_the_mlp_of_a_block():
    assert TransformerBlock(8, 2, mlp_ratio=3).config.feedforward.hidden == 24
    assert TransformerBlock(8, 2, ff_dim=5).config.feedforward.hidden == 5
    assert isinstance(TransformerBlock(8, 2).parameters(), list)


def test_the_block_of_table_6_has_3_2_million_parameters():
    assert sum(p.numel() for p in TransformerBlock(512, 8).parameters()) == 1_048_576 + 2_099_712 + 2 * 1_024


def test_the_gpt_has_64_453_632_parameters():
    """The course says 60 M and 64 M."""
    with torch.device("meta"):
        model = GPT(50_000, 512, 12, 8, 2048)
    assert isinstance(model.parameters(), list)
    assert sum(p.numel() for p in model.parameters()) == 64_453_632


def test_the_gpt_computes_what_a_plain_one_computes():
    torch.manual_seed(1)
    model, reference = GPT(23, 12, 2, 3, max_seq_len=16).eval(), PlainGPT(23, 12, 2, 3, 16)
    model.load_state_dict(reference.state_dict())
    tokens = torch.randint(23, (2, 16))
    assert model.forward(tokens).shape == (2, 16, 23)
    torch.testing.assert_close(model.forward(tokens), reference(tokens), atol=1e-4, rtol=1e-5)  # logits of about ±20
    assert torch.equal(model._create_causal_mask(4), create_causal_mask(4))


def test_generate_samples_at_temperature_one_and_keeps_the_prompt():
    torch.manual_seed(2)
    model, prompt = GPT(50, 16, 1, 2, 64), torch.tensor([[3, 5, 7]])
    samples = {tuple(model.generate(prompt, max_new_tokens=5)[0].tolist()) for _ in range(5)}
    assert len(samples) > 1
    assert {len(sample) for sample in samples} == {8}
    assert {sample[:3] for sample in samples} == {(3, 5, 7)}
    assert model.generate(prompt).shape == (1, 53)  # 50 new tokens by default
    greedy = mb.Transformer.generate(model, prompt, max_new_tokens=5)
    assert torch.equal(model.generate(prompt, 5, temperature=0.0), greedy)


def test_frequencies_of_samples_are_the_probabilities_of_the_model():
    torch.manual_seed(3)
    model = GPT(6, 16, 1, 2, 8).eval()
    with torch.no_grad():
        model.get_parameter("input.token.weight").mul_(20)
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
