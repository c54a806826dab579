"""Memory: 16 bytes a parameter, the tensors autograd saves, and the cache of every kind of attention."""

import gc
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support import random_pixels, random_tokens

from monoblock.accounting.activations import FLEX_FROM, block_activations, kept_activations
from monoblock.accounting.flops import BatchShape
from monoblock.accounting.memory import activation_bytes, attention_matrix_bytes, stored_bytes
from monoblock.accounting.report import account
from monoblock.config.families import bert, gpt, llama, t5, vaswani
from monoblock.config.knobs import rebuild, vary
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    Buckets,
    ExpertsConfig,
    FeedForwardConfig,
    FramesConfig,
    NormConfig,
    RecurrentConfig,
)
from monoblock.config.parts import NORM_ROWS
from monoblock.config.presets import PRESETS, preset, tiny
from monoblock.errors import ConfigError
from monoblock.model import Transformer
from monoblock.nn import sparse_attention
from monoblock.nn.feedforward import ACTIVATIONS

SMALL = {"vocab": 53, "width": 30, "depth": 2, "heads": 3, "context": 29}


# -- weights, gradients, optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_adamw_takes_16_bytes_a_parameter_in_any_precision(dtype):
    costs = account("gpt2")
    assert costs.training_bytes(1, 8, dtype).state == 16 * costs.parameters


@pytest.mark.parametrize(("optimizer", "bytes_each"), [("sgd", 8), ("momentum", 12), ("adam", 16), ("adamw", 16)])
def test_an_optimizer_adds_its_states(optimizer, bytes_each):
    costs = account("gpt2")
    assert costs.training_bytes(1, 8, "bf16", optimizer).state == bytes_each * costs.parameters


def test_muon_keeps_one_state_for_the_matrices_of_the_blocks():
    """In GPT-2 these are 12 blocks of 12 · width² weights; AdamW updates the rest."""
    costs = account("gpt2")
    adam, muon = costs.training_bytes(1, 8), costs.training_bytes(1, 8, optimizer="muon")
    assert adam.optimizer - muon.optimizer == 4 * 12 * 12 * 768**2


def test_muon_updates_every_expert_and_a_tied_block_once():
    experts = llama(**SMALL, hidden=17, experts=5)
    matrices = 2 * (4 * 30 * 30 + 30 * 5 + 5 * 3 * 30 * 17)
    costs = account(experts)
    assert costs.training_bytes().optimizer - costs.training_bytes(optimizer="muon").optimizer == 4 * matrices
    config = gpt(**SMALL)
    run = replace(config.decoder.pattern[0], tied=True)
    tied = account(replace(config, decoder=replace(config.decoder, pattern=(run,))))
    assert tied.training_bytes().optimizer - tied.training_bytes(optimizer="muon").optimizer == 4 * 12 * 30**2


def test_gpus_shard_the_state_but_not_the_activations():
    costs = account("gpt2")
    one, eight = costs.training_bytes(2), costs.training_bytes(2, gpus=8)
    assert 8 * eight.state == one.state
    assert eight.activations == one.activations


def test_the_parts_add_up_to_the_total():
    costs = account("gpt2").training_bytes(3, 101, "bf16", fused=False)
    parts = costs.to_dict()
    assert parts.pop("total") == sum(parts.values()) == costs.total
    assert set(parts) == {"weights", "gradients", "optimizer", "activations", "attention_matrices"}


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", 28), ("bf16", 14), ("int8", 7), ("int4", 4)])
def test_stored_bytes_are_rounded_up(dtype, expected):
    assert stored_bytes(7, dtype) == expected


# -- activations, against autograd -----------------------------------------------------------------------------------


def near(number):
    """Within 10 %, as far as the formulas go."""
    return pytest.approx(number, rel=0.1)


def saved_bytes(run, *modules):
    """The bytes of all tensors that autograd saves, shared storage once, without parameters and ids."""
    parameters = {p.untyped_storage().data_ptr() for module in modules for p in module.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        is_ids = (
            tensor.dtype == torch.long and tensor.dim() == 2 and tensor.shape[0] <= 2
        )  # tokens, positions, segments
        if storage.data_ptr() not in parameters and not is_ids:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # the reference keeps the address in use
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return sum(size for size, _ in saved.values()), result


class ReferenceBlock(torch.nn.Module):
    """A plain pre-norm block."""

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
def test_a_block_saves_what_autograd_saves_for_a_reference_block(fused):
    config = BlockConfig(
        width=30, attention=AttentionConfig(heads=3, mask="full"), feedforward=FeedForwardConfig(hidden=17)
    )
    block, x = ReferenceBlock(30, 3, 17, fused=fused), torch.randn(2, 13, 30, requires_grad=True)
    expected, _ = saved_bytes(lambda: block(x), block)
    saved = block_activations(config, BatchShape(2, 13, 13), 13, fused=fused)
    assert sum(activation_bytes(saved, "fp32")) == near(expected)
    assert activation_bytes(saved, "fp32")[1] == (0 if fused else 4 * 2 * 3 * 13 * 13)


def test_a_gpt_saves_what_autograd_saves_and_its_logits():
    config = gpt(**SMALL)
    model, ids = Transformer(config), torch.zeros(2, 13, dtype=torch.long)

    def run():
        logits = model(ids)
        return logits, F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    expected, (logits, _) = saved_bytes(run, model)
    loss_bytes = 4 + 8 * 2 * 13  # saved by the loss: the number of tokens and their ids
    costs = account(config).training_bytes(2, 13, "fp32", fused=True)
    assert costs.activations == near(expected - loss_bytes + logits.untyped_storage().nbytes())


def test_a_model_saves_one_attention_matrix_a_block_unless_fused():
    config = gpt(**SMALL)
    plain = account(config).training_bytes(2, 13, "fp32", fused=False)
    assert plain.attention_matrices == 2 * attention_matrix_bytes(batch=2, heads=3, queries=13, dtype="fp32")
    assert account(config).training_bytes(2, 13, "fp32", fused=True).attention_matrices == 0


def test_cross_attention_saves_a_target_by_source_matrix():
    config = vaswani(vocab=53, width=30, depth=2, heads=3, hidden=17)
    costs = account(config).training_bytes(2, 13, "fp32", fused=False, target_length=7)
    assert costs.attention_matrices == 4 * 2 * 2 * 3 * (13 * 13 + 7 * 7 + 7 * 13)


def test_checkpointing_saves_the_input_of_each_block_and_one_full_block():
    """Each further block adds one tensor of the width."""
    sizes = {**SMALL, "depth": 7}
    deep, deeper = account(gpt(**sizes)), account(gpt(**{**sizes, "depth": 8}))
    arguments = {"batch": 2, "length": 13, "dtype": "fp32", "fused": False, "checkpointing": True}
    one, two = deep.training_bytes(**arguments), deeper.training_bytes(**arguments)
    assert two.activations - one.activations == 4 * 2 * 13 * 30
    assert one.attention_matrices == two.attention_matrices == 4 * 2 * 3 * 13**2


@pytest.mark.parametrize("fused", [False, True])
def test_selective_checkpointing_also_keeps_the_outputs_of_products(fused):
    """Each further block adds its input, four products of attention, up and down; and the output of a fused kernel."""
    one, two = (account(gpt(**{**SMALL, "depth": depth})) for depth in (7, 8))
    arguments = {"batch": 2, "length": 13, "dtype": "fp32", "fused": fused, "checkpointing": "selective"}
    first, second = one.training_bytes(**arguments), two.training_bytes(**arguments)
    rows, kernel = 2 * 13, 30 if fused else 0
    assert second.activations - first.activations == 4 * rows * (30 + 4 * 30 + 120 + 30 + kernel)
    assert second.attention_matrices == first.attention_matrices


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_selective_checkpointing_takes_more_memory_than_full_and_less_than_none(name, fused):
    modes = (True, "selective", False)
    full, selective, plain = (account(name).training_bytes(2, fused=fused, checkpointing=mode) for mode in modes)
    assert full.total < selective.total < plain.total


@pytest.mark.parametrize("name", PRESETS)
def test_checkpointing_and_fused_kernels_reduce_memory_in_every_preset(name):
    costs = account(name)
    total = {(f, c): costs.training_bytes(2, fused=f, checkpointing=c).total for f in (0, 1) for c in (0, 1)}
    assert total[1, 1] < total[1, 0]
    assert total[0, 1] < total[0, 0]
    if all(block.attention.softcap is None for stack in costs.config.stacks.values() for block in stack.layers()):
        assert total[1, 0] < total[0, 0]
        assert total[1, 1] < total[0, 1]


def test_dropout_saves_its_masks():
    without, with_dropout = account(gpt(**SMALL)), account(gpt(**SMALL, dropout=0.1))
    masks = with_dropout.training_bytes(2, 13, "fp32").activations - without.training_bytes(2, 13, "fp32").activations
    rows = 2 * 13
    assert masks == rows * 30 + 2 * rows * (2 * 30 + 120)  # input; two sublayers and the hidden layer of each block


def test_experts_save_the_tokens_routed_to_them():
    block = BlockConfig(
        width=30,
        attention=AttentionConfig(heads=3),
        feedforward=FeedForwardConfig(hidden=17, experts=ExpertsConfig(count=5, top_k=3)),
    )
    one = replace(block, feedforward=FeedForwardConfig(hidden=17))
    size = BatchShape(2, 13, 13)
    more = block_activations(block, size, 13).elements - block_activations(one, size, 13).elements
    assert more == 26 * (2 * (30 + 2 * 17) + 30 + 5 + 3 * 2 * 30)  # two more experts, the router, three outputs


# -- models, against autograd ----------------------------------------------------------------------------------------


class FusedAttention(torch.autograd.Function):
    """A fused kernel that saves only its inputs, its output and the log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v, mask, out):
        if mask is not None and mask.dtype == torch.bool:
            mask = None  # not counted: from 128 tokens on a GPU uses FlexAttention, which saves none
        ctx.save_for_backward(q, k, v, mask, out, out.new_empty(q.shape[:3]))
        return out


def fused_attention(q, k, v, attn_mask=None, **_):
    B, H, T, _ = q.shape
    out = torch.empty(B, H, T, v.shape[-1]) if q.is_contiguous() else torch.empty(B, T, H, v.shape[-1]).transpose(1, 2)
    return FusedAttention.apply(q, k, v, attn_mask, out)


class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return torch.empty_like(x)


class FusedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.empty(x.shape, dtype=torch.bool))
        return torch.empty_like(x)


@pytest.fixture
def minimal_kernels(monkeypatch):
    """Replace the kernels of the CPU, which save more, by kernels like those of a GPU."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused_attention)
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight=None, eps=None: FusedRMSNorm.apply(x, weight))
    monkeypatch.setattr(F, "dropout", lambda x, p=0.5, training=True: FusedDropout.apply(x) if p and training else x)


def expected_bytes(config, **options):
    """The accounted bytes of a pass with its loss."""
    lengths = {} if config.family == "vision" else {"length": 89 if config.family == "encoder-decoder" else 101}
    if config.family == "encoder-decoder":
        lengths["target_length"] = 101
    costs = account(config).training_bytes(2, dtype="fp32", **lengths, **options)
    return costs.activations + costs.attention_matrices


def measured_bytes(config):
    """The bytes autograd saves in the same pass, plus logits and log-softmax, which the loss saves."""
    model = Transformer(config).train()
    inputs = [random_tokens(2, 101)]
    if config.family == "vision":
        inputs = [random_pixels(config, 2)]
    elif config.family == "encoder-decoder":
        is_audio = isinstance(config.input, FramesConfig)
        inputs = [
            torch.randn(2, config.input.channels, 2 * 89) if is_audio else random_tokens(2, 89),
            random_tokens(2, 101),
        ]
    saved, out = saved_bytes(lambda: model(*inputs), model)
    loss = 8 * out.numel() if config.head is not None and config.head.kind != "pooled" else 0
    return saved + loss


def long_tiny(name):
    """A tiny preset for texts of 101 tokens."""
    return tiny(name) if tiny(name).family == "vision" else vary(tiny(name), context=128)


def change_fields(config, **fields):
    """Change fields of all parts of a configuration by the name of their class."""

    def edit(part, values):
        if type(part).__name__ in fields:
            values.update(fields[type(part).__name__])

    return rebuild(config, edit)


GPT, LLAMA, MIXTRAL = long_tiny("gpt2"), long_tiny("llama3-8b"), long_tiny("mixtral-8x7b")
BERT = vary(bert(vocab=61, width=30, depth=2, heads=3, context=128), hidden=17)
PER_HEAD = {"qk_norm": NormConfig(), "qk_norm_over": "each_head"}
UNUSUAL = {
    "sinks": change_fields(GPT, AttentionConfig={"sinks": True}),
    "sinks on grouped heads": change_fields(LLAMA, AttentionConfig={"sinks": True}),
    "sinks that see everything": change_fields(BERT, AttentionConfig={"sinks": True}),
    "softcap": vary(GPT, softcap=5.0),
    "softcap that sees everything": vary(BERT, softcap=5.0),
    "softcap with dropout": vary(GPT, softcap=5.0, attention_dropout=0.1),
    "softcap on a learned bias": vary(GPT, softcap=5.0, positions="buckets"),
    "a prefix": vary(GPT, mask="prefix"),
    "a window no smaller than the text": vary(GPT, window=101),
    "a window with global tokens": change_fields(GPT, AttentionConfig={"window": 107, "global_tokens": True}),
    "a window for each side": vary(BERT, window=5, hidden=61),
    "ALiBi": vary(GPT, positions="alibi"),
    "ALiBi in a window": vary(GPT, positions="alibi", window=5),
    "ALiBi on both sides": vary(BERT, positions="alibi"),
    "buckets": vary(GPT, positions="buckets"),
    "buckets of each block": change_fields(GPT, AttentionConfig={"positions": Buckets(shared=False)}),
    "QK norm of each head": change_fields(GPT, AttentionConfig=PER_HEAD),
    "QK norm over the width": change_fields(LLAMA, AttentionConfig={"qk_norm": NormConfig(), "qk_norm_over": "width"}),
    **{f"norm {kind}": vary(GPT, norm=kind, qk_norm=True) for kind in NORM_ROWS if kind != "layer"},
    "clipped": change_fields(GPT, AttentionConfig={"clip": 3.0}),
    "values of another size": vary(GPT, value_dim=7),
    "layer scale": change_fields(GPT, BlockConfig={"layer_scale": 0.1}),
    "dropout": vary(GPT, dropout=0.1),
    "dropout behind relu": vary(GPT, dropout=0.1, activation="relu"),
    "experts that drop": vary(MIXTRAL, dropout=0.1),
    "clamped gates": change_fields(LLAMA, FeedForwardConfig={"clamp": 7.0}),
    "unrenormalised experts": change_fields(MIXTRAL, ExpertsConfig={"router": "softmax"}),
    "experts chosen first": change_fields(MIXTRAL, ExpertsConfig={"router": "top_k_softmax"}),
    "experts of one matrix": vary(GPT, experts=5),
    "a factorised embedding": change_fields(BERT, EmbeddingConfig={"dim": 7, "norm": NormConfig(), "dropout": 0.1}),
    "projected first": change_fields(BERT, EmbeddingConfig={"dim": 7, "projection": "first", "dropout": 0.1}),
    "a masked language model": bert(vocab=61, width=30, depth=1, heads=3, context=128, head="masked_lm"),
    "a classifier": bert(vocab=61, width=30, depth=1, heads=3, context=128, head="classifier"),
    "a classifier that drops": change_fields(
        bert(vocab=61, width=30, depth=1, heads=3, context=128, head="classifier"), HeadConfig={"dropout": 0.1}
    ),
    "a classifier of the mean": change_fields(
        bert(vocab=61, width=30, depth=1, heads=3, context=128, head="classifier"), HeadConfig={"pooling": "mean"}
    ),
    "a regression": bert(vocab=61, width=30, depth=1, heads=3, context=128, head="regression", classes=3),
    "a regression that drops": change_fields(
        bert(vocab=61, width=30, depth=1, heads=3, context=128, head="regression"), HeadConfig={"dropout": 0.1}
    ),
    "a regression of the mean": change_fields(
        bert(vocab=61, width=30, depth=1, heads=3, context=128, head="regression"),
        HeadConfig={"pooling": "mean", "pooler": "none"},
    ),
    "tags": bert(vocab=61, width=30, depth=1, heads=3, context=128, head="tagger", classes=5),
    "spans": bert(vocab=61, width=30, depth=1, heads=3, context=128, head="spans"),
    "no head": bert(vocab=61, width=30, depth=1, heads=3, context=128, head="none"),
    "a vector of length one": change_fields(BERT, HeadConfig={"normalize": True}),
    "a mean of length one": change_fields(BERT, HeadConfig={"normalize": True, "pooler": "none", "pooling": "mean"}),
    "registers": change_fields(tiny("vit-b16"), PatchConfig={"registers": 3}),
    "a teacher beside the classifier": change_fields(
        tiny("vit-b16"), PatchConfig={"distillation_token": True}, HeadConfig={"teacher": True}
    ),
    "a projected vector": change_fields(BERT, HeadConfig={"project": 13}),
    "the last vector projected": change_fields(BERT, HeadConfig={"project": 13, "pooler": "none", "pooling": "last"}),
    **{
        f"a pooler of {word}, {kind}": change_fields(
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
def test_a_preset_saves_what_autograd_saves(name, minimal_kernels):
    assert expected_bytes(long_tiny(name)) == near(measured_bytes(long_tiny(name)))


@pytest.mark.parametrize("config", UNUSUAL.values(), ids=list(UNUSUAL))
def test_an_unusual_model_saves_what_autograd_saves(config, minimal_kernels):
    assert expected_bytes(config) == near(measured_bytes(config))


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("vaswani")])
def test_a_cpu_saves_at_least_the_account_and_at_most_half_more(name):
    """More are the normalized elements of rms_norm, and the attention weights of T5 with its learned bias."""
    assert expected_bytes(long_tiny(name)) <= measured_bytes(long_tiny(name)) <= 1.5 * expected_bytes(long_tiny(name))


def test_a_cpu_saves_attention_weights_with_dropout():
    """With dropout on attention weights a CPU takes the plain path, with masks of four bytes an element."""
    saved = measured_bytes(long_tiny("vaswani-base"))
    assert expected_bytes(long_tiny("vaswani-base")) < saved
    assert (
        expected_bytes(long_tiny("vaswani-base"), fused=False)
        < saved
        < 1.5 * expected_bytes(long_tiny("vaswani-base"), fused=False)
    )


@pytest.mark.parametrize("config", [UNUSUAL["sinks"], UNUSUAL["softcap"]], ids=["sinks", "softcap"])
def test_attention_without_a_kernel_is_never_fused(config):
    costs = account(config)
    assert costs.training_bytes(2, 101, fused=True) == costs.training_bytes(2, 101, fused=False)


def test_windows_save_no_matrix():
    """A GPU computes them with FlexAttention."""
    costs = account(vary(GPT, window=5, context=1024))
    assert costs.training_bytes(2, 1024).attention_matrices == 0
    assert FLEX_FROM == sparse_attention.FLEX_MIN_QUERIES


# -- selective checkpointing, against what is stored -------------------------------------------------------------------


def uniform_models():
    """Models of text with at least two blocks of one kind."""
    for name, config in {**{name: long_tiny(name) for name in PRESETS}, **UNUSUAL}.items():
        (*_, stack) = config.stacks.values()
        is_text = config.family != "vision" and not isinstance(config.input, FramesConfig)
        if is_text and stack.depth > 1 and len(set(stack.layers())) == 1:
            yield pytest.param(config, id=name)


def stored_after_forward(tracker, model, layers, *inputs):
    """The bytes that exist after a forward pass through the first blocks of the last stack."""
    (model.decoder or model.encoder).layers = range(layers)
    before = tracker.current
    out = model(*inputs)
    gc.collect()
    return tracker.current - before, out


@pytest.fixture
def fast_collection():
    """Let the garbage collector look at new objects only; there are many old ones in a long test run."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("config", list(uniform_models()))
@pytest.mark.usefixtures("fast_collection")
def test_a_checkpointed_block_keeps_what_is_stored(config, fake, monkeypatch):
    """The difference between two blocks and one; GPU kernels are replaced by functions that save as much."""
    monkeypatch.setattr(fake, "ALIGNMENT", 1)
    (*_, stack) = config.stacks.values()
    inputs = [random_tokens(2, 89)] if config.family == "encoder-decoder" else []
    inputs.append(random_tokens(2, 101))
    shape, block = BatchShape(2, inputs[0].shape[1], 101), next(iter(stack.layers()))
    with fake.AllocationTracker() as tracker, fake.gpu_kernels(tracker):
        model = Transformer(config).train()
        for mode in ("selective", True):
            model.recompute(mode)
            one, _ = stored_after_forward(tracker, model, 1, *inputs)
            two, _ = stored_after_forward(tracker, model, 2, *inputs)
            kept = kept_activations(block, shape, 101, checkpointing=mode, fused=True)
            assert sum(activation_bytes(kept, "fp32")) == near(two - one), mode


# -- the cache -------------------------------------------------------------------------------------------------------


def test_a_cache_has_a_key_and_a_value_for_each_layer_head_and_position():
    assert account("gpt2").kv_cache_bytes(3, 101, "fp16") == 2 * 12 * 12 * 64 * 101 * 3 * 2


def test_grouped_heads_shrink_the_cache_by_their_ratio():
    many = account(llama(**SMALL)).kv_cache_bytes(2, 17)
    assert account(llama(**SMALL, kv_heads=1)).kv_cache_bytes(2, 17) * 3 == many


def test_a_window_stops_the_cache_from_growing():
    """Mistral 7B: a rolling buffer of 4,096 positions (Jiang et al. 2023), an eighth of 32K tokens."""
    costs = account("mistral-7b")
    assert costs.kv_cache_bytes(1, 4096) == costs.kv_cache_bytes(1, 32_768)
    without = account(llama(vocab=32_000, width=4096, depth=32, heads=32, kv_heads=8, hidden=14_336, context=32_768))
    assert without.kv_cache_bytes(1, 32_768) == 8 * costs.kv_cache_bytes(1, 32_768)


def test_local_and_global_blocks_cache_different_lengths():
    config = preset("gemma2-2b")
    bytes_per_position = 2 * 4 * 256 * 2
    assert account(config).kv_cache_bytes(1, 8192) == bytes_per_position * 13 * (4096 + 8192)


LOCAL = gpt(**SMALL, window=5)
CACHED = {
    "full": gpt(**SMALL),
    "prefix": gpt(**SMALL, mask="prefix"),
    "window": LOCAL,
    "window of one": gpt(**SMALL, window=1),
    "window longer than the text": gpt(**SMALL, window=40),
    "window with global tokens": vary(LOCAL, global_tokens=True),
    "window with random blocks": vary(LOCAL, random_blocks=2, block_size=4),
    "window with both": vary(LOCAL, global_tokens=True, random_blocks=1, block_size=4),
    "grouped heads and smaller values": llama(**SMALL, kv_heads=1, window=5, global_tokens=True, value_dim=7),
    "one block with a window and one without": tiny("gemma2-2b"),
    "encoder-decoder": t5(vocab=53, width=30, depth=2, heads=3, hidden=17),
    "encoder-decoder with global tokens": vary(tiny("t5-small"), window=5, global_tokens=True),
}


@torch.no_grad()
@pytest.mark.parametrize("length", [3, 23])
@pytest.mark.parametrize("config", CACHED.values(), ids=list(CACHED))
def test_a_cache_has_the_accounted_bytes(config, length):
    """With chunk=1, so that the ring of a block with a window has no columns beyond the window."""
    model, ids, source = Transformer(config).eval(), random_tokens(2, length, vocab=53), random_tokens(2, 13, vocab=53)
    cache = model.make_cache(2, length, chunk=1)
    is_encoder_decoder = config.family == "encoder-decoder"
    for piece in ids.split([2, *[1] * (length - 2)], 1):
        model(*((source, piece) if is_encoder_decoder else (piece,)), cache=cache)
        cache.advance(piece.shape[1])
    lengths = {"length": 13, "target_length": length} if is_encoder_decoder else {"length": length}
    assert account(config).kv_cache_bytes(2, dtype="fp32", **lengths) == cache.nbytes


@torch.no_grad()
def test_the_ring_of_a_window_has_at_most_a_chunk_more_than_is_accounted():
    model, per_token = Transformer(LOCAL).eval(), 4 * 2 * 2 * 30  # fp32, keys and values, blocks, width
    cache = model.make_cache(1, 29, chunk=4)
    model(random_tokens(1, 29, vocab=53), cache=cache)
    assert cache.nbytes == account(LOCAL).kv_cache_bytes(1, 29, "fp32") + 3 * per_token


@pytest.mark.parametrize("more", [{"global_tokens": True}, {"random_blocks": 2}])
def test_tokens_seen_beyond_a_window_are_cached_as_without_a_window(more):
    full, sparse = gpt(**SMALL), vary(LOCAL, **more)
    assert account(sparse).kv_cache_bytes(2, 29) == account(full).kv_cache_bytes(2, 29)
    assert account(sparse).decoding(prompt=7, new=20) == account(full).decoding(prompt=7, new=20)


def test_an_encoder_decoder_caches_the_source_too():
    config = t5(vocab=53, width=30, depth=2, heads=3, head_dim=8, hidden=17)
    assert account(config).kv_cache_bytes(5, 13, "fp32", target_length=7) == 4 * 5 * 2 * (2 * 3 * 8) * (13 + 7)


@pytest.mark.parametrize("name", ["bert-base", "vit-b16"])
def test_an_encoder_has_no_cache(name):
    assert account(name).kv_cache_bytes() == 0


def test_a_recurrent_model_has_no_cache():
    costs = account(RecurrentConfig(vocab=53, width=14))
    assert costs.kv_cache_bytes(1, 1000) == 0
    assert costs.training_bytes(2, 11, "fp32").state == 16 * costs.parameters


def test_additive_attention_saves_a_vector_for_every_pair():
    costs = account(RecurrentConfig(kind="encoder_decoder", vocab=53, width=14))
    one, two = (costs.training_bytes(1, 100, "fp32", target_length=n).activations for n in (1, 2))
    assert two - one > 4 * 100 * 14


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_invalid_options_are_errors():
    costs = account("gpt2")
    with pytest.raises(ConfigError, match="did you mean 'bf16'"):
        costs.kv_cache_bytes(1, 8, "bf61")
    with pytest.raises(ConfigError, match="did you mean 'muon'"):
        costs.training_bytes(1, 8, optimizer="moun")
    with pytest.raises(ConfigError, match="is not for training"):
        costs.training_bytes(1, 8, "int8")
    with pytest.raises(ConfigError, match="checkpointing='all' is not one of False, 'selective', True"):
        costs.training_bytes(1, 8, checkpointing="all")
    with pytest.raises(ConfigError, match="gpus"):
        costs.training_bytes(1, 8, gpus=0)
