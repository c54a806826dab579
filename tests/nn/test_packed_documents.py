"""Texts packed into one row equal the same texts in rows of their own, with padding: logits and gradients."""

import functools

import pytest
import torch
from support import (
    VARIANTS,
    assert_near,
    is_encoder_decoder,
    randomize_weights,
    tiny_config,
)

from monoblock.config.families import bert, vaswani
from monoblock.config.knobs import vary
from monoblock.errors import InputError
from monoblock.kernels.gpu import assume_constant_result
from monoblock.model import Transformer
from monoblock.nn import attention, packed_documents, sparse_attention
from monoblock.nn.attention import attend
from monoblock.nn.masks import TokenPositions, arange_positions, everything
from monoblock.nn.packed_documents import DocumentRows, PackedDocuments

SOURCE_LENGTHS, TARGET_LENGTHS = [5, 1, 9, 3, 7], [2, 6, 4, 8, 1]
ROTARY = "rotary encoder-decoder"
FAMILIES = ["bert-base", "t5-small", "vaswani-base", ROTARY, "llama-7b"]
# Key heads, soft caps, ALiBi, sinks, experts, other masks, and attention that is not a softmax.
OTHERS = ["llama3-8b", "gemma2-2b", "bloom-560m", "mixtral-8x7b", "bart-base", *VARIANTS]


def config_of(name):
    if name == "bert-base":
        return vary(tiny_config(name), head="masked_lm")
    return vary(tiny_config("vaswani-base"), positions="rotary") if name == ROTARY else tiny_config(name)


@functools.cache
def model_of(name, dtype=torch.float64):
    torch.manual_seed(0)
    return randomize_weights(Transformer(config_of(name))).to(dtype).eval()


def texts(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 61, (length,), generator=generator) for length in lengths]


def pad(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


def pack(rows, *, as_tensor, spare=2):
    """One row, after which there are empty documents; the longest may be shorter than `max_length`."""
    lengths = [len(row) for row in rows]
    documents = PackedDocuments.from_lengths([*lengths, 0, 0], max(lengths) + spare)
    return torch.cat(rows)[None], documents.numbers if as_tensor else documents


def run_padded(model):
    """The logits of all tokens, one text after the other."""
    source, source_mask = pad(texts(SOURCE_LENGTHS, 1))
    if not is_encoder_decoder(model.config):
        return model(source, source_mask)[source_mask]
    target, target_mask = pad(texts(TARGET_LENGTHS, 2))
    return model(source, target, source_mask)[target_mask]


def run_packed(model, *, as_tensor):
    source, documents = pack(texts(SOURCE_LENGTHS, 1), as_tensor=as_tensor)
    if not is_encoder_decoder(model.config):
        return model(source, documents=documents)[0]
    target, target_documents = pack(texts(TARGET_LENGTHS, 2), as_tensor=as_tensor, spare=0)
    return model(source, target, source_documents=documents, target_documents=target_documents)[0]


def gradients(model, logits):
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)
    named = list(model.named_parameters())
    grads = torch.autograd.grad((logits * weights).sum(), [p for _, p in named], allow_unused=True)
    return {name: grad for (name, _), grad in zip(named, grads, strict=True) if grad is not None}


@pytest.mark.parametrize(
    ("name", "as_tensor"), [*((name, True) for name in FAMILIES), *((name, False) for name in FAMILIES + OTHERS)]
)
def test_packed_texts_equal_padded_texts(name, as_tensor):
    model = model_of(name)
    padded, packed = run_padded(model), run_packed(model, as_tensor=as_tensor)
    assert_near(packed, padded)
    expected, found = gradients(model, padded), gradients(model, packed)
    assert found.keys() == expected.keys()
    for key in expected:
        assert_near(found[key], expected[key])


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_texts_equal_padded_texts_in_single_precision(name):
    model = model_of(name, torch.float32)
    padded, packed = run_padded(model), run_packed(model, as_tensor=False)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_each_packed_text_is_pooled(pooling):
    config = bert(vocab=61, width=36, depth=1, heads=3, context=64, hidden=46, head="classifier", classes=4)
    config = vary(config, pooling=pooling)
    model = randomize_weights(Transformer(config)).double().eval()
    ids, mask = pad(texts(SOURCE_LENGTHS, 1))
    packed, documents = pack(texts(SOURCE_LENGTHS, 1), as_tensor=False)
    found = model(packed, documents=documents)
    assert found.shape == (len(SOURCE_LENGTHS) + 2, 4)
    assert_near(found[: len(SOURCE_LENGTHS)], model(ids, mask))


def test_dropout_of_attention_keeps_texts_apart():
    config = vaswani(vocab=61, width=36, depth=1, heads=3, context=64, hidden=46, attention_dropout=0.5)
    model = randomize_weights(Transformer(config)).double().train()
    (source, documents), (target, target_documents) = (
        pack(texts(lengths, 1), as_tensor=False) for lengths in (SOURCE_LENGTHS, TARGET_LENGTHS)
    )

    def run(ids):
        torch.manual_seed(0)
        return model(ids, target, source_documents=documents, target_documents=target_documents)[0]

    changed = source.clone()
    changed[0, : SOURCE_LENGTHS[0]] = 0
    before, after = run(source), run(changed)
    first = TARGET_LENGTHS[0]
    assert not torch.allclose(before[:first], after[:first])
    assert torch.equal(before[first:], after[first:])


def test_activation_checkpointing_gives_the_same():
    model = Transformer(vary(tiny_config("vaswani-base"), dropout=0.0)).double().train()
    expected = run_packed(model, as_tensor=False)
    grads = gradients(model, expected)
    model.recompute()
    recomputed = gradients(model, run_packed(model, as_tensor=False))
    for key in grads:
        assert_near(recomputed[key], grads[key])


def test_rows_and_back():
    documents = PackedDocuments.from_lengths([2, 0, 3], 4)
    rows, x = DocumentRows(documents), torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert documents.positions().tolist() == [[0, 1, 0, 1, 2]]
    padded = rows.to_rows(x)
    assert padded.shape == (3, 4, 2)
    assert torch.equal(padded[2, :3], x[2:])
    assert padded[1].count_nonzero() == padded[0, 2:].count_nonzero() == 0
    assert torch.equal(rows.from_rows(padded), x)
    assert torch.autograd.gradcheck(rows.to_rows, (x,))
    assert torch.autograd.gradcheck(rows.from_rows, (torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True),))


# -- the kernel for variable lengths ----------------------------------------------------------------------------------


def reference_kernel(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, causal, scale):
    """What torch.nn.attention.varlen.varlen_attn computes, with the plain formula."""
    out = torch.zeros_like(q)
    for number in range(len(cu_seq_q) - 1):
        queries, keys = (slice(int(cu[number]), int(cu[number + 1])) for cu in (cu_seq_q, cu_seq_k))
        assert queries.stop - queries.start <= max_q
        assert keys.stop - keys.start <= max_k
        parts = (t.transpose(0, 1)[None] for t in (q[queries], k[keys], v[keys]))
        length = queries.stop - queries.start
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None] if causal else None
        out[queries] = attend(*parts, mask, scale=scale)[0].transpose(0, 1)
    return out


def kernel_of_torch_2_10(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None, scale=None):
    assert q.shape[1] == k.shape[1]
    return reference_kernel(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale)


def kernel_of_torch_2_13(
    q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert window_size in ((-1, -1), (-1, 0))
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return reference_kernel(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size == (-1, 0), scale)


@pytest.fixture(params=[kernel_of_torch_2_10, kernel_of_torch_2_13], ids=["2.10", "2.13"])
def kernel_calls(request, monkeypatch):
    """Put a kernel in place of torch's, as if this were a GPU that has it; return the list of its calls."""
    import inspect

    calls = []

    def kernel(*args, **options):
        calls.append(options)
        return request.param(*args, **options)

    names = frozenset(inspect.signature(request.param).parameters)
    monkeypatch.setattr(packed_documents, "_KERNEL", (kernel, names))
    monkeypatch.setattr(attention, "supports_varlen", lambda q, v, dtype: q.shape[-1] == v.shape[-1])
    return calls


KERNEL_CALLS = {"bert-base": 2, "vaswani-base": 6, ROTARY: 6, "llama-7b": 2, "llama3-8b": 2}


@pytest.mark.parametrize("name", KERNEL_CALLS)
def test_the_kernel_for_variable_lengths_gives_the_same(name, kernel_calls):
    model = model_of(name)
    packed = run_packed(model, as_tensor=False)
    assert len(kernel_calls) == KERNEL_CALLS[name]
    assert_near(packed, run_padded(model))


@torch.library.custom_op("monoblock_tests::varlen", mutates_args=())
def opaque_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int,
    is_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    return reference_kernel(q, k, v, cu_q, cu_k, max_q, max_k, is_causal, None)


@opaque_kernel.register_fake
def _(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
    return torch.empty_like(q)


@pytest.mark.parametrize("kernel_calls", [kernel_of_torch_2_13], ids=["2.13"], indirect=True)
def test_with_the_kernel_a_model_compiles_to_one_graph(kernel_calls, monkeypatch):
    """It did not with torch 2.11, which cannot trace bool(tuple)."""
    model = model_of("vaswani-base", torch.float32)
    monkeypatch.setattr(packed_documents, "_KERNEL", (opaque_kernel, frozenset({"is_causal"})))
    expected = run_packed(model, as_tensor=False)
    monkeypatch.setattr(model, "forward", torch.compile(model.forward, backend="eager", fullgraph=True))
    assert_near(run_packed(model, as_tensor=False), expected)


@pytest.mark.parametrize("name", ["t5-small", "gemma2-2b", "bloom-560m", "sparse encoder", "linear attention"])
def test_what_the_kernel_cannot_compute_is_computed_otherwise(name, kernel_calls):
    """A bias, a soft cap of the scores, a window; of the encoder-decoder only cross-attention has no bias."""
    model = model_of(name)
    assert_near(run_packed(model, as_tensor=False), run_padded(model))
    assert len(kernel_calls) == (2 if name == "t5-small" else 0)


def test_dropout_and_taps_of_scores_do_not_use_the_kernel(kernel_calls):
    model = Transformer(vary(tiny_config("bert-base"), attention_dropout=0.1)).train()
    run_packed(model, as_tensor=False)
    assert not kernel_calls


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["vaswani-base", "bert-base", "llama3-8b"])
def test_the_kernel_of_the_gpu_is_near_the_dense_mask(name):
    config = vary(config_of(name), width=48, heads=6) if name != "llama3-8b" else config_of(name)
    model = randomize_weights(Transformer(config)).eval().cuda()
    run = functools.partial(run_packed_on, model, "cuda")
    exact = run(torch.float32)
    error = (run(torch.bfloat16).float() - exact).norm() / exact.norm()
    assert error < 0.03, "bf16 with a dense mask has an error of about 0.01"
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(run(torch.bfloat16), run(torch.bfloat16)), "a graph that breaks raises"


def run_packed_on(model, device, dtype):
    source, documents = pack(texts(SOURCE_LENGTHS, 1), as_tensor=False)
    arguments = {"documents": documents.to(device)}
    if is_encoder_decoder(model.config):
        target, target_documents = pack(texts(TARGET_LENGTHS, 2), as_tensor=False)
        arguments = {"target": target.to(device), "source_documents": documents.to(device)}
        arguments["target_documents"] = target_documents.to(device)
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        return model(source.to(device), **arguments)


# -- block masks, and what is refused ---------------------------------------------------------------------------------


def test_a_block_mask_has_the_padding_of_every_row(monkeypatch):
    """The positions are the same in all rows, the padding is not."""
    q = arange_positions(128)
    k = TokenPositions(q.positions, valid=torch.arange(128) < torch.tensor([[128], [1]]))
    monkeypatch.setattr(sparse_attention, "compile_once", lambda function: function)
    assert sparse_attention.build_block_mask(everything.resolve(q, k)).shape[0] == 2


def test_arguments_that_do_not_fit_are_refused():
    model, (source, documents) = model_of("vaswani-base"), pack(texts(SOURCE_LENGTHS, 1), as_tensor=False)
    fewer = PackedDocuments.from_lengths([source.shape[1]])
    cases = {
        "not documents": {"documents": documents},
        "needs the documents of both sides": {"source_documents": documents},
        "both as a tensor": {"source_documents": documents, "target_documents": documents.numbers},
        "7 source documents but 1 target": {"source_documents": documents, "target_documents": fewer},
        "cannot cache": {
            "source_documents": documents,
            "target_documents": documents,
            "cache": model.make_cache(1, 40),
        },
    }
    for message, arguments in cases.items():
        with pytest.raises(InputError, match=message):
            model(source, source, **arguments)
    with pytest.raises(InputError, match="positions cannot be used with PackedDocuments"):
        model_of("llama-7b")(source, documents=documents, positions=torch.zeros_like(source))
    with pytest.raises(InputError, match="source_documents was given"):
        model_of("llama-7b")(source, source_documents=documents)
    with pytest.raises(InputError, match="below the longest document of 5 tokens"):
        PackedDocuments.from_lengths([5], 4)
    with pytest.raises(InputError, match="at least one above 0"):
        PackedDocuments.from_lengths([0, 0])
    for lengths in ([1.5, 2], ["a"], None, [3, -1], []):
        with pytest.raises(InputError, match="lengths must be whole numbers"):
            PackedDocuments.from_lengths(lengths)


def test_a_function_of_constant_result_is_marked_as_torch_marks_it():
    ours, theirs = (mark(lambda: True) for mark in (assume_constant_result, torch.compiler.assume_constant_result))
    assert vars(ours) == vars(theirs) != {}
