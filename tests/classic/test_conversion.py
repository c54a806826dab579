"""`to_monoblock()` of a document's class computes the same with the same weights, and keeps what is tied."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monoblock as mb
from monoblock.classic import blocks, chapter, lecture, module13
from monoblock.errors import InputError
from monoblock.nn.attention import AttentionContext
from monoblock.nn.masks import arange_positions, everything, mask_from_matrix

PAGE = Path(__file__).parents[2] / "docs/classic.md"
T, S = 7, 5
SIZES = {"d_model": 12, "num_heads": 3, "num_blocks": 2, "d_ff": 20, "max_len": 32}
SEEN = torch.ones(T, T).tril()


def lecture_gpt():
    return lecture.GPT(23, d_model=12, n_heads=3, n_layers=2, max_len=16)


def course_gpt():
    return module13.GPT(23, 12, num_layers=2, num_heads=3, max_seq_len=16)


def random_weights(module):
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3)
    return module.eval()


def context(mask=None, keys=T):
    if mask is not None:
        return AttentionContext(mask_from_matrix(mask != 0))
    return AttentionContext(everything.resolve(arange_positions(T), arange_positions(keys)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: lecture.TransformerBlock(12, 3, 20),
        lambda: blocks.EncoderBlock(12, 3, 20),
        lambda: module13.TransformerBlock(12, 3),
        lambda: chapter.TransformerBlock(12, 3, 20),
    ],
    ids=["lecture", "blocks", "module13", "chapter"],
)
def test_a_block_is_the_block_of_monoblock(make):
    torch.manual_seed(0)
    listing, x = random_weights(make()), torch.randn(2, T, 12)
    ours = listing.to_monoblock()
    assert isinstance(ours, mb.Block)
    mask = SEEN == 0 if isinstance(listing, lecture.TransformerBlock) else SEEN  # the lecture blocks where True
    torch.testing.assert_close(listing(x, mask), ours(x, context(SEEN)), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(listing(x), ours(x, context()), atol=2e-5, rtol=1e-5)


def test_a_decoder_block_is_the_block_of_monoblock():
    torch.manual_seed(1)
    listing, x, memory = random_weights(blocks.DecoderBlock(12, 3, 20)), torch.randn(2, T, 12), torch.randn(2, S, 12)
    expected = listing.to_monoblock()(x, context(SEEN), memory=memory, memory_context=context(keys=S))
    torch.testing.assert_close(listing(x, memory, SEEN), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [lambda: module13.LayerNorm(12, eps=0.3), lambda: module13.MLP(12, 20)])
def test_the_other_parts_of_the_course_are_those_of_monoblock(make):
    listing, x = random_weights(make()), torch.randn(2, T, 12)
    torch.testing.assert_close(listing(x), listing.to_monoblock()(x), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("module", [blocks, chapter, module13])
def test_attention_is_that_of_monoblock(module):
    listing, x = random_weights(module.MultiHeadAttention(12, 3)), torch.randn(2, T, 12)
    output = listing(*(x, x, x) if module is blocks else (x,), SEEN)
    output = output[0] if module is chapter else output
    torch.testing.assert_close(output, listing.to_monoblock()(x, context(SEEN)), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [lecture_gpt, course_gpt])
def test_a_gpt_is_the_transformer_of_monoblock_also_after_a_step_of_training(make):
    torch.manual_seed(2)
    model, ids = make(), torch.randint(23, (3, 16))
    ours = model.eval().to_monoblock()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    before = ours(ids)
    optimizer.step()
    assert (ours(ids) - before).abs().max() > 1e-2  # the weights are shared
    torch.testing.assert_close(ours(ids), model(ids), atol=2e-5, rtol=1e-5)
    assert ours.config.context == 16
    assert torch.equal(model.generate(ids[:, :3], 5, temperature=0.0), ours.generate(ids[:, :3], max_new_tokens=5))


def test_the_encoder_decoder_is_the_transformer_of_monoblock():
    torch.manual_seed(3)
    model = blocks.Transformer(23, 19, **SIZES).eval()
    source, target = torch.randint(1, 23, (2, S)), torch.randint(1, 19, (2, T))
    ours = model.to_monoblock()
    torch.testing.assert_close(ours(source, target), model(source, target, tgt_mask=SEEN), atol=2e-5, rtol=1e-5)
    assert ours.input.token.weight.data_ptr() == model.src_embed.weight.data_ptr()
    assert model.generate(source, max_new_tokens=4, num_beams=2).shape == (2, 5)


def test_what_only_a_transformer_has_is_an_error_that_names_the_conversion():
    with pytest.raises(InputError, match=r"got a GPT; write model\.to_monoblock\(\)"):
        mb.account(lecture_gpt())
    with pytest.raises(AttributeError, match=r"to_monoblock\(\) returns a monoblock\.Transformer"):
        lecture_gpt().stream(torch.tensor([[3, 5, 7]]))


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(code) == 2
    exec(compile("".join(code), "docs/classic.md", "exec"), {})
    assert (tmp_path / "gpt" / "model.safetensors").exists()


# -- tying ------------------------------------------------------------------------------------------------------------


def test_the_tying_of_the_lecture_saves_a_matrix_and_survives_saving(tmp_path):
    """`self.head.weight = self.tok_emb.weight`, in the lecture's list of bugs."""
    model, ids = lecture.GPT(65).eval(), torch.randint(65, (2, 11))
    assert sum(weight.numel() for weight in model.parameters()) == 2_743_680
    model.head.weight = model.tok_emb.weight
    assert sum(weight.numel() for weight in model.parameters()) == 2_743_680 - 65 * 192
    expected = F.linear(model.to_monoblock().encode(ids), model.tok_emb.weight)
    torch.testing.assert_close(model(ids), expected, atol=2e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = mb.Transformer.from_pretrained(tmp_path)
    assert loaded.config.tie == "output"
    assert sum(weight.numel() for weight in loaded.parameters()) == 2_743_680 - 65 * 192
    torch.testing.assert_close(loaded(ids), model(ids), atol=2e-5, rtol=1e-5)


def test_the_doctor_sees_whether_the_lecture_s_model_is_tied():
    model = lecture_gpt()
    model.head.weight = model.tok_emb.weight
    assert mb.diagnose(model, checks="tying", tied=True).ok
    model.head.weight = nn.Parameter(model.tok_emb.weight.detach().clone())
    assert not mb.diagnose(model, checks="tying").ok


def tie_all(model):
    model.out_proj.weight = model.tgt_embed.weight = model.src_embed.weight
    model.out_proj.bias = None


def tie_the_output(model):
    model.out_proj.weight = model.tgt_embed.weight


def tie_the_embeddings(model):
    model.tgt_embed.weight = model.src_embed.weight


@pytest.mark.parametrize(
    ("tie", "kind"), [(tie_all, "three_way"), (tie_the_output, "output"), (tie_the_embeddings, "source_target")]
)
def test_the_tying_of_the_tutorial_survives_conversion_and_saving(tie, kind, tmp_path):
    torch.manual_seed(4)
    model = blocks.Transformer(23, 23, **SIZES).eval()
    tie(model)
    source, target = torch.randint(1, 23, (2, S)), torch.randint(1, 23, (2, T))
    expected = model(source, target, tgt_mask=SEEN)
    converted = model.to_monoblock()
    assert converted.config.tie == kind
    model.save_pretrained(tmp_path)
    for ours in (converted, mb.Transformer.from_pretrained(tmp_path)):
        assert ours.config.tie == kind
        assert sum(w.numel() for w in ours.parameters()) == sum(w.numel() for w in model.parameters())
        torch.testing.assert_close(ours(source, target), expected, atol=1e-4, rtol=1e-5)


def test_an_output_that_is_tied_to_the_source_only_is_refused():
    model = blocks.Transformer(23, 23, **SIZES)
    model.out_proj.weight = model.src_embed.weight
    with pytest.raises(InputError, match=r"tgt_embed is not; write model\.tgt_embed\.weight"):
        model.to_monoblock()


def adapter(model):
    model.blocks[1].adapter = nn.Linear(12, 12)


def other_activation(model):
    model.blocks[1].ffn[1] = nn.ReLU()


def other_heads(model):
    model.blocks[1].attn.num_heads, model.blocks[1].attn.head_dim = 2, 6


def other_forward_pass(model):
    model.forward = lambda ids: model.head(model.tok_emb(ids))


def one_block_less(model):
    del model.blocks[1]


@pytest.mark.parametrize("change", [adapter, other_activation, other_heads, other_forward_pass, one_block_less])
def test_a_changed_model_is_not_converted(change):
    model = random_weights(lecture_gpt())
    model.to_monoblock()
    change(model)
    with pytest.raises(InputError, match=r"this GPT (has other weights|was changed and no longer computes)"):
        model.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=2)


@pytest.mark.parametrize("share", ["ffn", "block"])
def test_layers_that_share_weights_are_refused(share):
    model = lecture_gpt()
    if share == "ffn":
        model.blocks[1].ffn = model.blocks[0].ffn
    else:
        model.blocks[1] = model.blocks[0]
    count = sum(weight.numel() for weight in model.parameters())
    with pytest.raises(InputError, match=rf"share weights: it has {count:,} parameters.*tied=True"):
        model.to_monoblock()
