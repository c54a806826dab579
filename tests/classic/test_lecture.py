"""The lecture's calls give the shapes and numbers that it shows, and compute what PyTorch's own modules compute."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monoblock.classic.chapter import scaled_dot_product_attention
from monoblock.classic.lecture import GPT, TransformerBlock, multi_head_attention
from monoblock.nn.positions import sinusoid


def blocked(length):
    return torch.ones(length, length).triu(1).bool()


def test_multi_head_attention_is_that_of_pytorch():
    torch.manual_seed(0)
    reference = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    x = torch.randn(2, 5, 12)
    matrices = [weight.T for weight in (*reference.in_proj_weight.chunk(3), reference.out_proj.weight)]
    out = multi_head_attention(x, *matrices, n_heads=3)
    torch.testing.assert_close(out, reference(x, x, x)[0], atol=1e-5, rtol=0)


def test_the_shapes_of_the_trace():
    x = torch.randn(1, 3, 4)
    assert multi_head_attention(x, *torch.randn(4, 4, 4), n_heads=2).shape == (1, 3, 4)


def test_the_scores_of_the_numeric_example_are_17_9_53_and_11():
    query = torch.tensor([1.0, 2, 3, 4])
    keys = torch.tensor([[5.0, 6, 7, 8], [9, 0, 1, 2]])
    scores = torch.einsum("hk,nhk->hn", query.view(2, 2), keys.view(2, 2, 2))
    assert scores.tolist() == [[17, 9], [53, 11]]
    # and so are those inside attention: the logarithms of the ratios of its weights, times sqrt(d_k)
    one_hot = torch.eye(2)[None, None]
    out, weights = scaled_dot_product_attention(
        query.view(1, 2, 1, 2).double(), keys.view(2, 2, 2).transpose(0, 1)[None].double(), one_hot.double()
    )
    ratios = (weights[..., 0] / weights[..., 1]).log() * math.sqrt(2)
    torch.testing.assert_close(ratios.flatten(), torch.tensor([17.0 - 9, 53.0 - 11]).double())
    torch.testing.assert_close(out, weights)


def test_the_mask_example_gives_016_074_010_and_0():
    scores = torch.tensor([1.0, 2.5, 0.5, 3.0])
    exponentials = scores[:3].exp()
    assert [round(float(e), 2) for e in exponentials] == [2.72, 12.18, 1.65]
    assert float(exponentials.sum()) == pytest.approx(16.55, abs=0.005)
    query, keys = torch.tensor([[[1.0]]]), scores.view(1, 4, 1)  # d_k = 1: a score is the product of two numbers
    mask = torch.ones(4, 4).tril()[2:3]
    _, weights = scaled_dot_product_attention(query, keys, torch.zeros(1, 4, 1), mask)
    assert [round(float(w), 2) for w in weights.flatten()] == [0.16, 0.74, 0.10, 0.0]
    assert weights[0, 0, 3] == 0
    _, unmasked = scaled_dot_product_attention(query, keys, torch.zeros(1, 4, 1))
    assert unmasked.argmax() == 3


def test_a_rotation_by_two_turns_position_5_into_position_7():
    theta, k = 0.1, 2
    table = sinusoid(torch.arange(9) * theta, 2).double()  # with two features the only frequency is 1
    rotation = torch.tensor([[math.cos(theta * k), math.sin(theta * k)], [-math.sin(theta * k), math.cos(theta * k)]])
    assert [round(float(v), 3) for v in table[5]] == [0.479, 0.878]
    assert [round(float(v), 3) for v in table[7]] == [0.644, 0.765]
    assert [round(float(v), 3) for v in rotation.flatten()] == [0.980, 0.199, -0.199, 0.980]
    torch.testing.assert_close(rotation.double() @ table[5], table[7])
    torch.testing.assert_close(rotation.double() @ table[1], table[3])  # the same matrix at every position


MASK_KINDS = ["none", "blocked", "added to scores", "added to scores of each head"]


@pytest.mark.parametrize("mask", [None, blocked(5), torch.randn(5, 5), torch.randn(8, 5, 5)], ids=MASK_KINDS)
def test_the_block_is_a_pre_norm_encoder_layer_of_pytorch(mask):
    torch.manual_seed(2)
    block, x = TransformerBlock(16, 4, 32), torch.randn(2, 5, 16)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, F.gelu, batch_first=True, norm_first=True)
    theirs = layer.state_dict()
    names = {"self_attn": "attn", "linear1": "ffn.0", "linear2": "ffn.2"}
    rename = {key: key.replace(key.split(".")[0], names.get(key.split(".")[0], key.split(".")[0])) for key in theirs}
    block.load_state_dict({rename[key]: weight for key, weight in theirs.items()})
    torch.testing.assert_close(block(x, mask=mask), layer(x, src_mask=mask), atol=1e-5, rtol=0)


def test_parameters_of_the_example_block():
    """d_model 512, d_ff 2048: 4 d² in attention and 2 d d_ff in the feed-forward network, biases not counted."""
    with torch.device("meta"):
        block = TransformerBlock(d_model=512, n_heads=8, d_ff=2048)
    matrices = {name: p.numel() for name, p in block.named_parameters() if p.dim() == 2}
    assert sum(count for name, count in matrices.items() if name.startswith("attn")) == 1_048_576
    assert sum(count for name, count in matrices.items() if name.startswith("ffn")) == 2_097_152
    assert sum(p.numel() for name, p in block.named_parameters() if "norm" in name) == 2_048
    total = 1_048_576 + 2_097_152 + 2_048
    shares = [round(100 * part / total, 2) for part in (1_048_576, 2_097_152, 2_048)]
    assert (round(total / 1e6, 2), shares) == (3.15, [33.31, 66.62, 0.07])


def test_the_gpt_has_2_743_680_parameters_and_predicts_for_each_token():
    model = GPT(65)
    assert sum(p.numel() for p in model.parameters()) == 2_743_680
    assert (model.tok_emb.weight.shape, model.pos_emb.weight.shape) == ((65, 192), (256, 192))
    assert len(model.blocks) == 6
    assert model(torch.zeros(2, 11, dtype=torch.long)).shape == (2, 11, 65)


def test_a_step_of_training_lowers_the_loss_and_the_gpt_generates():
    torch.manual_seed(4)
    model, ids = GPT(23, d_model=24, n_heads=3, n_layers=2, max_len=16), torch.randint(23, (4, 16))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(8):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.generate(ids[:, :3], max_new_tokens=5).shape == (4, 8)
