"""Bytes: the usual 16 a parameter, what autograd really keeps, and the keys and values of every kind of attention."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support import pixels, tokens

from monoblock import attention
from monoblock.accounting.activations import block_held
from monoblock.accounting.flops import Sizes
from monoblock.accounting.held import FLEX_FROM
from monoblock.accounting.memory import attention_matrix_bytes, held_bytes, stored_bytes
from monoblock.accounting.report import account
from monoblock.config import (
    AttentionConfig,
    BlockConfig,
    Buckets,
    ExpertsConfig,
    FeedForwardConfig,
    FramesConfig,
    NormConfig,
    RecurrentConfig,
)
from monoblock.errors import ConfigError
from monoblock.families import bert, gpt, llama, t5, vaswani
from monoblock.feedforward import ACTIVATIONS
from monoblock.knobs import rebuild, vary
from monoblock.model import Transformer
from monoblock.presets import PRESETS, preset, tiny

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
    """Bytes of all tensors that autograd holds on to while `run` runs, shared storage once; no parameters, no ids."""
    own = {p.untyped_storage().data_ptr() for module in modules for p in module.parameters()}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        ids = tensor.dtype == torch.long and tensor.dim() == 2 and tensor.shape[0] <= 2  # tokens, places, segments
        if storage.data_ptr() not in own and not ids:
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
    remembered = 4 + 8 * 2 * 13  # by the loss: the number of tokens, and which they are
    found = account(config).training_bytes(2, 13, "fp32", fused=True)
    assert found.activations == expected - remembered + logits.untyped_storage().nbytes()


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
def test_checkpointing_and_where_there_is_a_kernel_fusing_save_memory_in_every_preset(name):
    found = account(name)
    total = {(f, c): found.training_bytes(2, fused=f, checkpointing=c).total for f in (0, 1) for c in (0, 1)}
    assert total[1, 1] < total[1, 0]
    assert total[0, 1] < total[0, 0]
    if all(block.attention.softcap is None for stack in found.config.stacks.values() for block in stack.layers()):
        assert total[1, 0] < total[0, 0]
        assert total[1, 1] < total[0, 1]


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
    routing = 30 + 5 + 3 + 1  # what the router reads, its scores, the best of them and their sum
    assert more == 26 * (2 * (30 + 2 * 17) + routing + 3 * (2 * 30 + 1))


# -- whole models, against what autograd keeps ------------------------------------------------------------------------


class Attending(torch.autograd.Function):
    """A fused kernel that keeps no more than it needs: what it read, what it gave, and the logarithms of the sums."""

    @staticmethod
    def forward(ctx, q, k, v, mask, out):
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)  # as torch does, anew in each block
        ctx.save_for_backward(q, k, v, mask, out, out.new_empty(q.shape[:3]))
        return out


def attending(q, k, v, attn_mask=None, **_):
    B, H, T, _ = q.shape
    out = torch.empty(B, H, T, v.shape[-1]) if q.is_contiguous() else torch.empty(B, T, H, v.shape[-1]).transpose(1, 2)
    return Attending.apply(q, k, v, attn_mask, out)


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return torch.empty_like(x)


class Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.empty(x.shape, dtype=torch.bool))
        return torch.empty_like(x)


@pytest.fixture
def sparing(monkeypatch):
    """Kernels as a GPU has them in the place of the CPU's, which keep more."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", attending)
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight=None, eps=None: Normed.apply(x, weight))
    monkeypatch.setattr(F, "dropout", lambda x, p=0.5, training=True: Dropped.apply(x) if p and training else x)


def accounted(config, **options):
    """What the account says of a pass without its loss, which keeps the logits and as many numbers in fp32."""
    lengths = {} if config.family == "vision" else {"length": 89 if config.family == "encoder-decoder" else 101}
    if config.family == "encoder-decoder":
        lengths["target_length"] = 101
    found = account(config).training_bytes(2, dtype="fp32", **lengths, **options)
    return found.activations + found.attention_matrices


def measured(config):
    """What autograd keeps in the same pass, and of that the part of a loss that the account counts besides."""
    model = Transformer(config).train()
    inputs = [tokens(2, 101)]
    if config.family == "vision":
        inputs = [pixels(config, 2)]
    elif config.family == "encoder-decoder":
        sound = isinstance(config.input, FramesConfig)
        inputs = [torch.randn(2, config.input.channels, 2 * 89) if sound else tokens(2, 89), tokens(2, 101)]
    kept, out = kept_bytes(lambda: model(*inputs), model)
    loss = 8 * out.numel() if config.head is not None and config.head.kind != "pooled" else 0
    return kept + loss


def text(name):
    """A preset at toy size, for texts of 101 tokens."""
    return tiny(name) if tiny(name).family == "vision" else vary(tiny(name), context=128)


def edited(config, **fields):
    """A configuration with other fields of its attentions, feed-forwards, blocks, inputs or head."""

    def edit(part, values):
        if type(part).__name__ in fields:
            values.update(fields[type(part).__name__])

    return rebuild(config, edit)


GPT, LLAMA, MIXTRAL = text("gpt2"), text("llama3-8b"), text("mixtral-8x7b")
BERT = vary(bert(vocab=61, width=30, depth=2, heads=3, context=128), hidden=17)
PER_HEAD = {"qk_norm": NormConfig(), "qk_norm_over": "each_head"}
UNUSUAL = {
    "sinks": edited(GPT, AttentionConfig={"sinks": True}),
    "sinks on grouped heads": edited(LLAMA, AttentionConfig={"sinks": True}),
    "sinks that see everything": edited(BERT, AttentionConfig={"sinks": True}),
    "softcap": vary(GPT, softcap=5.0),
    "softcap that sees everything": vary(BERT, softcap=5.0),
    "softcap with dropout": vary(GPT, softcap=5.0, attention_dropout=0.1),
    "softcap on a learned bias": vary(GPT, softcap=5.0, positions="buckets"),
    "a prefix": vary(GPT, mask="prefix"),
    "a window no smaller than the text": vary(GPT, window=101),
    "a window with global tokens": edited(GPT, AttentionConfig={"window": 107, "global_tokens": True}),
    "a window for each side": vary(BERT, window=5),
    "ALiBi": vary(GPT, positions="alibi"),
    "ALiBi in a window": vary(GPT, positions="alibi", window=5),
    "ALiBi on both sides": vary(BERT, positions="alibi"),
    "buckets": vary(GPT, positions="buckets"),
    "buckets of each block": edited(GPT, AttentionConfig={"positions": Buckets(shared=False)}),
    "QK norm of each head": edited(GPT, AttentionConfig=PER_HEAD),
    "QK norm over the width": edited(LLAMA, AttentionConfig={"qk_norm": NormConfig(), "qk_norm_over": "width"}),
    "clipped": edited(GPT, AttentionConfig={"clip": 3.0}),
    "values of another size": vary(GPT, value_dim=7),
    "layer scale": edited(GPT, BlockConfig={"layer_scale": 0.1}),
    "dropout": vary(GPT, dropout=0.1),
    "dropout behind relu": vary(GPT, dropout=0.1, activation="relu"),
    "experts that drop": vary(MIXTRAL, dropout=0.1),
    "clamped gates": edited(LLAMA, FeedForwardConfig={"clamp": 7.0}),
    "unrenormalised experts": edited(MIXTRAL, ExpertsConfig={"router": "softmax"}),
    "experts chosen first": edited(MIXTRAL, ExpertsConfig={"router": "top_k_softmax"}),
    "experts of one matrix": vary(GPT, experts=5),
    "a factorised embedding": edited(BERT, EmbeddingConfig={"dim": 7, "norm": NormConfig(), "dropout": 0.1}),
    "projected first": edited(BERT, EmbeddingConfig={"dim": 7, "projection": "first", "dropout": 0.1}),
    "a masked language model": bert(vocab=61, width=30, depth=1, heads=3, context=128, head="masked_lm"),
    "a classifier": bert(vocab=61, width=30, depth=1, heads=3, context=128, head="classifier"),
    "a classifier that drops": edited(
        bert(vocab=61, width=30, depth=1, heads=3, context=128, head="classifier"), HeadConfig={"dropout": 0.1}
    ),
    "a classifier of the mean": edited(
        bert(vocab=61, width=30, depth=1, heads=3, context=128, head="classifier"), HeadConfig={"pooling": "mean"}
    ),
    "tags": bert(vocab=61, width=30, depth=1, heads=3, context=128, head="tagger", classes=5),
    "spans": bert(vocab=61, width=30, depth=1, heads=3, context=128, head="spans"),
    "no head": bert(vocab=61, width=30, depth=1, heads=3, context=128, head="none"),
    "a vector of length one": edited(BERT, HeadConfig={"normalize": True}),
    "a mean of length one": edited(BERT, HeadConfig={"normalize": True, "pooler": "none", "pooling": "mean"}),
    "registers": edited(tiny("vit-b16"), PatchConfig={"registers": 3}),
    "a teacher beside the classifier": edited(
        tiny("vit-b16"), PatchConfig={"distillation_token": True}, HeadConfig={"teacher": True}
    ),
    "a projected vector": edited(BERT, HeadConfig={"project": 13}),
    "the last vector projected": edited(BERT, HeadConfig={"project": 13, "pooler": "none", "pooling": "last"}),
    **{
        f"a pooler of {word}, {kind}": edited(
            bert(vocab=61, width=30, depth=1, heads=3, context=128, head=kind), HeadConfig={"pooler": word}
        )
        for word, kind in (("relu", "classifier"), ("gelu", "classifier"), ("gelu", "pooled"))
    },
    "frames": replace(
        vary(vaswani(vocab=61, target_vocab=61, width=30, depth=2, heads=3, hidden=17), dropout=0.0),
        input=FramesConfig(channels=7, context=89),
    ),
    **{f"{word}": vary(GPT, activation=word) for word in ACTIVATIONS},
    **{f"{word}, gated": vary(GPT, activation=word, gated=True) for word in ACTIVATIONS},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_holds_what_autograd_holds_for_sparing_kernels(name, sparing):
    assert accounted(text(name)) == measured(text(name))


@pytest.mark.parametrize("config", UNUSUAL.values(), ids=list(UNUSUAL))
def test_an_unusual_model_holds_what_autograd_holds_for_sparing_kernels(config, sparing):
    assert accounted(config) == measured(config)


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("vaswani")])
def test_a_cpu_keeps_no_less_than_the_account_and_at_most_half_as_much_again(name):
    """More are the normed numbers of rms_norm, and T5's attention weights, because its bias is learned."""
    assert accounted(text(name)) <= measured(text(name)) <= 1.5 * accounted(text(name))


def test_a_cpu_keeps_attention_weights_where_they_are_dropped():
    """The Transformer of 2017 drops attention weights: there a CPU takes the plain way, and masks of four bytes."""
    kept = measured(text("vaswani-base"))
    assert accounted(text("vaswani-base")) < kept
    assert accounted(text("vaswani-base"), fused=False) < kept < 1.5 * accounted(text("vaswani-base"), fused=False)


@pytest.mark.parametrize("config", [UNUSUAL["sinks"], UNUSUAL["softcap"]], ids=["sinks", "softcap"])
def test_what_no_kernel_computes_is_never_fused(config):
    found = account(config)
    assert found.training_bytes(2, 101, fused=True) == found.training_bytes(2, 101, fused=False)


def test_long_windows_are_left_to_flexattention_which_keeps_no_mask():
    found = account(vary(GPT, window=5, context=1024))
    assert FLEX_FROM == attention.FLEX_FROM
    assert found.training_bytes(2, FLEX_FROM - 1).attention_matrices == 2 * 2 * (FLEX_FROM - 1) ** 2
    assert found.training_bytes(2, FLEX_FROM).attention_matrices == 0


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
