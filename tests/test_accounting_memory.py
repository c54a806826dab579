"""Bytes: the usual 16 a parameter, what autograd really keeps, and the keys and values of every kind of attention."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from monoblock.accounting.activations import block_held
from monoblock.accounting.flops import Sizes
from monoblock.accounting.memory import attention_matrix_bytes, held_bytes, stored_bytes
from monoblock.accounting.report import account
from monoblock.config import AttentionConfig, BlockConfig, ExpertsConfig, FeedForwardConfig, RecurrentConfig
from monoblock.errors import ConfigError
from monoblock.families import gpt, llama, t5, vaswani
from monoblock.model import Transformer
from monoblock.presets import PRESETS, preset

SMALL = {"vocab": 53, "width": 30, "depth": 2, "heads": 3, "context": 29}


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_adamw_takes_16_bytes_a_parameter_in_any_precision(dtype):
    found = account("gpt2")
    assert found.training_bytes(1, 8, dtype).state == 16 * found.parameters


@pytest.mark.parametrize(("optimizer", "bytes_each"), [("sgd", 8), ("momentum", 12), ("adam", 16), ("adamw", 16)])
def test_an_optimizer_adds_its_states(optimizer, bytes_each):
    found = account("gpt2")
    assert found.training_bytes(1, 8, "bf16", optimizer).state == bytes_each * found.parameters


def test_muon_keeps_one_state_for_the_matrices_of_the_blocks():
    """In GPT-2 those are 12 blocks of 12 width² weights; the rest is left to AdamW."""
    found = account("gpt2")
    adam, muon = found.training_bytes(1, 8), found.training_bytes(1, 8, optimizer="muon")
    assert adam.optimizer - muon.optimizer == 4 * 12 * 12 * 768**2


def test_muon_takes_every_expert_and_no_tied_block_twice():
    experts = llama(**SMALL, hidden=17, experts=5)
    matrices = 2 * (4 * 30 * 30 + 30 * 5 + 5 * 3 * 30 * 17)
    found = account(experts)
    assert found.training_bytes().optimizer - found.training_bytes(optimizer="muon").optimizer == 4 * matrices
    both = gpt(**SMALL)
    run = replace(both.decoder.pattern[0], tied=True)
    tied = account(replace(both, decoder=replace(both.decoder, pattern=(run,))))
    assert tied.training_bytes().optimizer - tied.training_bytes(optimizer="muon").optimizer == 4 * 12 * 30**2


def test_gpus_share_the_state_and_keep_their_activations():
    found = account("gpt2")
    one, eight = found.training_bytes(2), found.training_bytes(2, gpus=8)
    assert 8 * eight.state == one.state
    assert eight.activations == one.activations


def test_parts_add_up_and_are_all_reported():
    found = account("gpt2").training_bytes(3, 101, "bf16", fused=False)
    parts = found.to_dict()
    assert parts.pop("total") == sum(parts.values()) == found.total
    assert set(parts) == {"weights", "gradients", "optimizer", "activations", "attention_matrices"}


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", 28), ("bf16", 14), ("int8", 7), ("int4", 4)])
def test_seven_numbers_take_whole_bytes(dtype, expected):
    assert stored_bytes(7, dtype) == expected


# -- activations, against what autograd keeps ------------------------------------------------------------------------


def kept_bytes(run, *modules):
    """Bytes of all tensors that autograd holds on to while `run` runs, parameters left out, shared storage once."""
    own = {p.untyped_storage().data_ptr() for module in modules for p in module.parameters()}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            held[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return sum(size for size, _ in held.values()), result


class Textbook(torch.nn.Module):
    """A pre-norm block as a textbook writes it."""

    def __init__(self, width, heads, hidden, *, fused=False):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (torch.nn.Linear(width, width) for _ in range(4))
        self.up, self.down = torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, width)

    def forward(self, x):
        h = self.first(x)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = (q @ k.mT * (1 / math.sqrt(q.shape[-1]))).softmax(-1) @ v
        x = x + self.output(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


@pytest.mark.parametrize("fused", [False, True])
def test_a_block_holds_what_autograd_holds_for_a_textbook_block(fused):
    config = BlockConfig(
        width=30, attention=AttentionConfig(heads=3, mask="full"), feedforward=FeedForwardConfig(hidden=17)
    )
    block, x = Textbook(30, 3, 17, fused=fused), torch.randn(2, 13, 30, requires_grad=True)
    expected, _ = kept_bytes(lambda: block(x), block)
    held = block_held(config, Sizes(2, 13, 13), 13, fused=fused)
    assert sum(held_bytes(held, "fp32")) == expected
    assert held_bytes(held, "fp32")[1] == (0 if fused else 4 * 2 * 3 * 13 * 13)


def test_a_gpt_holds_what_autograd_holds_and_its_logits():
    config = gpt(**SMALL)
    model, ids = Transformer(config), torch.zeros(2, 13, dtype=torch.long)

    def run():
        logits = model(ids)
        return logits, F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    expected, (logits, _) = kept_bytes(run, model)
    total_weight = 4  # the loss remembers the number of tokens
    found = account(config).training_bytes(2, 13, "fp32", fused=True)
    assert found.activations == expected - total_weight + logits.untyped_storage().nbytes()


def test_a_model_keeps_one_attention_matrix_a_block_unless_fused():
    config = gpt(**SMALL)
    plain = account(config).training_bytes(2, 13, "fp32", fused=False)
    assert plain.attention_matrices == 2 * attention_matrix_bytes(batch=2, heads=3, queries=13, dtype="fp32")
    assert account(config).training_bytes(2, 13, "fp32", fused=True).attention_matrices == 0


def test_cross_attention_keeps_a_rectangle():
    config = vaswani(vocab=53, width=30, depth=2, heads=3, hidden=17)
    found = account(config).training_bytes(2, 13, "fp32", fused=False, target_length=7)
    assert found.attention_matrices == 4 * 2 * 2 * 3 * (13 * 13 + 7 * 7 + 7 * 13)


def test_checkpointing_keeps_the_input_of_each_block_and_one_block_whole():
    """Each further block costs one tensor of width numbers a token."""
    sizes = {**SMALL, "depth": 7}
    deep, deeper = account(gpt(**sizes)), account(gpt(**{**sizes, "depth": 8}))
    arguments = {"batch": 2, "length": 13, "dtype": "fp32", "fused": False, "checkpointing": True}
    one, two = deep.training_bytes(**arguments), deeper.training_bytes(**arguments)
    assert two.activations - one.activations == 4 * 2 * 13 * 30
    assert one.attention_matrices == two.attention_matrices == 4 * 2 * 3 * 13**2


@pytest.mark.parametrize("name", PRESETS)
def test_fusing_and_checkpointing_each_save_memory_in_every_preset(name):
    found = account(name)
    lengths = {"batch": 2} if found.family == "vision" else {"batch": 2, "length": 128}
    total = {(f, c): found.training_bytes(**lengths, fused=f, checkpointing=c).total for f in (0, 1) for c in (0, 1)}
    assert total[1, 1] < total[1, 0] < total[0, 0]
    assert total[1, 1] < total[0, 1] < total[0, 0]


def test_dropout_keeps_its_masks():
    dry, wet = account(gpt(**SMALL)), account(gpt(**SMALL, dropout=0.1))
    more = wet.training_bytes(2, 13, "fp32").activations - dry.training_bytes(2, 13, "fp32").activations
    rows = 2 * 13
    assert more == rows * 30 + 2 * rows * (2 * 30 + 120)  # input; two sublayers and the hidden layer of each block


def test_experts_hold_the_tokens_sent_to_them():
    block = BlockConfig(
        width=30,
        attention=AttentionConfig(heads=3),
        feedforward=FeedForwardConfig(hidden=17, experts=ExpertsConfig(count=5, top_k=3)),
    )
    one = replace(block, feedforward=FeedForwardConfig(hidden=17))
    size = Sizes(2, 13, 13)
    more = block_held(block, size, 13).numbers - block_held(one, size, 13).numbers
    assert more == 26 * (2 * (30 + 2 * 17) + 5)


# -- keys and values -------------------------------------------------------------------------------------------------


def test_a_cache_keeps_a_key_and_a_value_a_layer_head_and_place():
    assert account("gpt2").kv_cache_bytes(3, 101, "fp16") == 2 * 12 * 12 * 64 * 101 * 3 * 2


def test_grouped_heads_shrink_the_cache_by_their_ratio():
    many = account(llama(**SMALL)).kv_cache_bytes(2, 17)
    assert account(llama(**SMALL, kv_heads=1)).kv_cache_bytes(2, 17) * 3 == many


def test_a_window_stops_the_cache_from_growing():
    """Mistral 7B: a rolling buffer of 4,096 places (Jiang et al. 2023); at 32K tokens that is an eighth."""
    found = account("mistral-7b")
    assert found.kv_cache_bytes(1, 4096) == found.kv_cache_bytes(1, 32_768)
    without = account(llama(vocab=32_000, width=4096, depth=32, heads=32, kv_heads=8, hidden=14_336, context=32_768))
    assert without.kv_cache_bytes(1, 32_768) == 8 * found.kv_cache_bytes(1, 32_768)


def test_local_and_global_blocks_are_kept_each_by_its_own_length():
    config = preset("gemma2-2b")
    place = 2 * 4 * 256 * 2
    assert account(config).kv_cache_bytes(1, 8192) == place * 13 * (4096 + 8192)


def test_an_encoder_decoder_keeps_the_source_too():
    config = t5(vocab=53, width=30, depth=2, heads=3, head_dim=8, hidden=17)
    assert account(config).kv_cache_bytes(5, 13, "fp32", target_length=7) == 4 * 5 * 2 * (2 * 3 * 8) * (13 + 7)


@pytest.mark.parametrize("name", ["bert-base", "vit-b16"])
def test_an_encoder_keeps_nothing(name):
    assert account(name).kv_cache_bytes() == 0


def test_a_recurrent_model_keeps_nothing_that_grows():
    found = account(RecurrentConfig(vocab=53, width=14))
    assert found.kv_cache_bytes(1, 1000) == 0
    assert found.training_bytes(2, 11, "fp32").state == 16 * found.parameters


def test_additive_attention_keeps_a_vector_for_every_pair():
    found = account(RecurrentConfig(kind="encoder_decoder", vocab=53, width=14))
    one, two = (found.training_bytes(1, 100, "fp32", target_length=n).activations for n in (1, 2))
    assert two - one > 4 * 100 * 14


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_accounted_for_is_refused():
    found = account("gpt2")
    with pytest.raises(ConfigError, match="did you mean 'bf16'"):
        found.kv_cache_bytes(1, 8, "bf61")
    with pytest.raises(ConfigError, match="did you mean 'muon'"):
        found.training_bytes(1, 8, optimizer="moun")
    with pytest.raises(ConfigError, match="not trained in"):
        found.training_bytes(1, 8, "int8")
    with pytest.raises(ConfigError, match="gpus"):
        found.training_bytes(1, 8, gpus=0)
