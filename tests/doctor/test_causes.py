"""Faults of small plain models: each is found, its cause is named, and the mended twin has no findings."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monoblock as mb

VOCAB, WIDTH, HEADS, CONTEXT = 61, 32, 4, 64


def rotate(x, positions):
    half = x.size(-1) // 2
    angles = positions[:, None] / 100 ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class Attention(nn.Module):
    """Causal attention with one of the faults."""

    def __init__(self, fault=None):
        super().__init__()
        self.qkv, self.out, self.fault = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), fault

    def visible(self, T, keep):
        mask, fault = torch.ones(T, T, dtype=torch.bool).tril(1 if self.fault == "off by one" else 0), self.fault
        if fault == "no mask" or (fault == "right to 32" and T > 32):
            mask = torch.ones_like(mask)
        if fault == "first 16":
            mask[16:] = True
        if fault == "upper triangle":
            mask = mask.T
        if keep is not None:
            keep = keep.bool()[:, None, None, :]
            mask = (mask & (~keep if fault == "inverted mask" else keep)) | torch.eye(T, dtype=torch.bool)
        return mask

    def forward(self, x, keep=None):
        (B, T, _), fault = x.shape, self.fault
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(x).split(WIDTH, -1))
        q, k = (rotate(t, torch.arange(T)) for t in (q, k))
        if fault == "rotated values":
            v = rotate(v, torch.arange(T))
        if fault == "normalized":
            q, k = (F.normalize(t, dim=-1) * t.size(-1) ** 0.5 for t in (q, k))
        divisors = {"sqrt(width)": math.sqrt(WIDTH), "head size": q.size(-1), "width": WIDTH}
        scores = q @ k.transpose(-2, -1) / divisors.get(fault, math.sqrt(q.size(-1)))
        mask = self.visible(T, keep)
        if fault == "scaled twice":
            y = F.scaled_dot_product_attention(q / math.sqrt(q.size(-1)), k, v, attn_mask=mask)
            return self.out(y.transpose(1, 2).reshape(B, T, WIDTH))
        if fault == "weak mask":
            scores = scores.masked_fill(~mask, -10.0)
        elif fault == "weak added mask":
            scores = scores + torch.zeros(T, T).masked_fill(~mask, -8.0)
        elif fault == "multiplied mask":
            scores = scores * mask
        else:
            scores = scores.masked_fill(~mask, -1e9)
        y = scores.softmax({"softmax over queries": -2, "softmax over heads": 1}.get(fault, -1)) @ v
        if fault != "heads not transposed":
            y = y.transpose(1, 2)
        return self.out(y.reshape(B, T, WIDTH))


class SequenceNorm(nn.Module):
    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


class Block(nn.Module):
    def __init__(self, fault=None, last=False):
        super().__init__()
        self.attention, self.norm1 = Attention(fault), nn.LayerNorm(WIDTH)
        self.norm2 = SequenceNorm() if fault == "sequence norm" else nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.drop = nn.Dropout(1.0 if fault == "dropout of 1" and last else 0.1)
        self.has_residual = not (fault == "no residual" and last)

    def forward(self, x, keep=None):
        x = x + self.drop(self.attention(self.norm1(x), keep))
        return self.has_residual * x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, fault=None, depth=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(fault, last=i == depth - 1) for i in range(depth))
        self.norm, self.head, self.block_size = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB), CONTEXT

    def hidden(self, ids, keep=None):
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x, keep)
        return self.norm(x)

    def forward(self, ids, attention_mask=None):
        return self.head(self.hidden(ids, attention_mask))


class LastOnly(GPT):
    """Without targets, only the logits of the last token, as in generation."""

    def forward(self, idx, targets=None):
        x = self.hidden(idx)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LastOnlyWithoutTargets(GPT):
    def forward(self, idx):
        return self.head(self.hidden(idx)[:, -1:])


class Repeating(GPT):
    """A table of positions beside the rotation."""

    def __init__(self, fault=None):
        super().__init__()
        self.pos, self.fault = nn.Embedding(CONTEXT, WIDTH), fault

    def hidden(self, ids, keep=None):
        places = torch.arange(ids.shape[1])
        x = self.tok(ids) + self.pos(places % 8 if self.fault else places)
        for block in self.blocks:
            x = block(x, keep)
        return self.norm(x)


class Encoder(GPT):
    """A classifier: attention without a causal mask."""

    def __init__(self, fault=None):
        super().__init__(fault)
        self.classes = nn.Linear(WIDTH, 5)
        for block in self.blocks:
            block.attention.visible = lambda T, keep: torch.ones(T, T, dtype=torch.bool)

    def forward(self, ids):
        return self.classes(self.hidden(ids).mean(1))


def build(model, fault, **options):
    torch.manual_seed(0)
    return mb.diagnose(model(fault), **options)


def found(report):
    return [(finding.check, finding.verdict) for finding in report.findings]


CASES = [
    # model, fault, check, verdict, words of the cause
    (GPT, "no mask", "causality", "fail", "sees all later tokens (counted over all layers): no causal mask is applied"),
    (GPT, "off by one", "causality", "fail", "off by one: query i also sees key i + 1"),
    (GPT, "upper triangle", "causality", "fail", "the mask is inverted: query i sees the keys after it"),
    (GPT, "first 16", "causality", "fail", "covers only the first 16 queries"),
    (
        GPT,
        "weak mask",
        "causality",
        "fail",
        "the mask is too weak: it sets or lowers masked scores by the finite value -10",
    ),
    (GPT, "weak added mask", "causality", "fail", "finite value -8"),
    (GPT, "multiplied mask", "causality", "fail", "the mask is too weak"),
    (GPT, "sequence norm", "causality", "fail", "outside attention: a norm or a mean over the sequence"),
    (GPT, "heads not transposed", "causality", "fail", "a reshape without a transpose"),
    (GPT, "right to 32", "causality", "fail", "texts of 23 tokens are right, texts of 64 are not"),
    (LastOnly, "first 16", "causality", "fail", "covers only the first 16 queries"),
    (LastOnlyWithoutTargets, "off by one", "causality", "fail", "off by one"),
    (GPT, "inverted mask", "padding", "fail", "the mask is inverted"),
    (
        GPT,
        "softmax over queries",
        "mask_after_softmax",
        "fail",
        "even if the mask of the scores is right: later queries",
    ),
    (GPT, "softmax over heads", "mask_after_softmax", "fail", "over the wrong axis, -3"),
    (Encoder, "softmax over queries", "mask_after_softmax", "fail", "queries share the weight of a key"),
    (Encoder, "softmax over heads", "mask_after_softmax", "fail", "heads instead of keys"),
    (GPT, "sqrt(width)", "scale", "warn", "by sqrt(width) instead of sqrt(head size)"),
    (GPT, "head size", "scale", "warn", "divided by the head size, 8, without the square root: "),
    (GPT, "width", "scale", "warn", "divided by the width, without the square root"),
    (GPT, "scaled twice", "scale", "warn", "its square root twice: scaled_dot_product_attention divides by it, too"),
    (GPT, "dropout of 1", "dropout", "fail", "blocks.1.drop drops everything"),
    (
        GPT,
        "no residual",
        "gradient_flow",
        "warn",
        "in layer 1 the result of the feed-forward layer replaces the stream x",
    ),
    (GPT, "rotated values", "positions_twice", "warn", "the values are rotated"),
    (Repeating, "repeated", "position_offset", "warn", "positions repeat"),
]


@pytest.mark.parametrize(("model", "fault", "check", "verdict", "words"), CASES)
def test_the_cause_is_named(model, fault, check, verdict, words):
    report = build(model, fault)
    assert found(report) == [(check, verdict)]
    assert words in report.findings[0].reason


@pytest.mark.parametrize("model", [GPT, LastOnly, LastOnlyWithoutTargets, Encoder, Repeating])
def test_the_mended_twin_has_no_findings(model):
    report = build(model, None)
    assert found(report) == []
    if model is not Encoder:
        assert "causality" in {result.name for result in report.checks}


class Stream(GPT):
    """Loses the output of blocks on the way."""

    def __init__(self, fault=None):
        super().__init__(depth=3)
        self.fault = fault

    def hidden(self, ids, keep=None):
        first = x = self.tok(ids)
        for i, block in enumerate(self.blocks):
            if self.fault == "overwritten" and i == 2:
                x = first
            if self.fault == "detached" and i == 2:
                x = x.detach()
            y = block(first if self.fault == "not handed on" else x, keep)
            x = y
        return self.norm(y)


@pytest.mark.parametrize(
    ("fault", "words", "fix"),
    [
        ("overwritten", "the output of the blocks [0, 1] is not used", "x = block(x)"),
        ("not handed on", "the output of the blocks [0, 1] is not used", "x = block(x)"),
        ("detached", "no gradient reaches the blocks [0, 1]: something above them is detached", "remove .detach()"),
    ],
)
def test_blocks_whose_output_is_not_used_are_told_from_detached_ones(fault, words, fix):
    report = build(Stream, fault)
    assert found(report) == [("gradient_flow", "fail")]
    assert words in report.findings[0].reason
    assert fix in report.findings[0].fix
    assert found(build(Stream, None)) == []


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("family", "is_missing"), [("llama", True), ("gpt_neo", False), ("gpt2", False)])
def test_a_missing_scale_is_compared_with_the_configuration(family, is_missing, implementation):
    """A module that states the factor 1 itself is not believed, unless its configuration says so."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "attn_implementation": implementation}
    if family == "llama":
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **sizes))
        for layer in model.model.layers:
            layer.self_attn.scaling = 1.0
    elif family == "gpt_neo":
        types = [[["global", "local"], 1]]
        shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": types, "window_size": 8}
        sizes["attn_implementation"] = "eager"  # transformers has no other for this family
        model = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**shape, **sizes))
    else:
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "scale_attn_weights": False}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **sizes))
    report = mb.diagnose(model.eval(), checks=["scale"])
    assert found(report) == ([("scale", "fail")] if is_missing else [])


def test_queries_and_keys_normalized_to_sqrt_of_their_size_are_healthy():
    assert found(build(GPT, "normalized")) == []


def test_one_token_ahead_is_written_in_the_singular():
    torch.manual_seed(0)
    (finding,) = mb.diagnose(GPT("off by one", depth=1)).findings
    assert finding.reason.startswith("a token sees 1 token ahead (counted over all layers): ")
    assert "In training the model can copy the answer; in generation there is nothing to copy." in finding.reason


def test_attention_inside_modules_of_pytorch_is_recorded():
    class Standard(nn.Module):
        def __init__(self, mask=None):
            super().__init__()
            self.mask = mask
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
            self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, ids):
            T = ids.shape[1]
            mask = None if self.mask is None else self.mask(torch.ones(T, T).triu(1))
            return self.head(self.layers(self.tok(ids) + self.pos(torch.arange(T)), mask=mask))

    torch.manual_seed(0)
    (finding,) = mb.diagnose(Standard()).findings
    assert "no causal mask is applied. " in finding.reason
    assert mb.diagnose(Standard(), kind="bidirectional").ok
    (finding,) = mb.diagnose(Standard(lambda later: later)).findings
    assert "the mask is of floats, which are added to the scores (+1)" in finding.reason
    assert "mask.bool()" in finding.fix
    assert mb.diagnose(Standard(lambda later: later.bool())).findings == []


@pytest.mark.parametrize(("convert", "is_wrong"), [(torch.Tensor.float, True), (torch.Tensor.bool, False)])
def test_a_padding_mask_of_floats_is_found_although_evaluation_reads_it_as_one_of_booleans(convert, is_wrong):
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
            self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, ids):
            x, padding = self.tok(ids) + self.pos(torch.arange(ids.shape[1])), ids == 0
            tokens = ~padding[..., None]
            x = self.layers(x, src_key_padding_mask=convert(padding))
            return self.head((x * tokens).sum(1) / tokens.sum(1))

    torch.manual_seed(0)
    report = mb.diagnose(Averaging(), pad_id=0)
    assert found(report) == ([("padding", "fail")] if is_wrong else [])
    assert not is_wrong or "the mask is of floats" in report.findings[0].reason


def test_the_length_is_honoured_and_stated():
    torch.manual_seed(0)
    report = mb.diagnose(GPT("right to 32"), length=48)
    assert report.findings[0].evidence["length"] == 48
    torch.manual_seed(0)
    report = mb.diagnose(GPT("right to 32"), length=32)
    assert (found(report), report.lengths) == ([], (23, 32))
    assert "probes: texts of 23 tokens, for causality also of 32" in str(report)


def mean_over_all_places(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum") / labels.numel()


def mean_over_tokens(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


def test_a_loss_that_is_divided_by_the_padding_too_is_found():
    ids = torch.randint(1, VOCAB, (4, 20), generator=torch.Generator().manual_seed(0))
    ids[:2, 12:] = 0
    options = {"batch": (ids[:, :-1], ids[:, 1:]), "pad_id": 0, "checks": "pad_in_loss"}
    report = build(GPT, None, loss=mean_over_all_places, **options)
    assert found(report) == [("pad_in_loss", "fail")]
    assert "divided by a number that counts the padding" in report.findings[0].reason
    assert found(build(GPT, None, loss=mean_over_tokens, **options)) == []


@pytest.mark.parametrize(
    ("model", "fault", "leaks"),
    [
        (GPT, "softmax over queries", True),
        (GPT, "softmax over heads", True),
        (Encoder, "softmax over queries", False),
        (Encoder, "softmax over heads", False),
    ],
)
def test_a_softmax_over_the_wrong_axis_is_said_to_leak_only_if_it_does(model, fault, leaks):
    report = build(model, fault)
    (finding,) = report.findings
    assert ("change_by_later_tokens" in finding.evidence) is leaks
    assert ("The future leaks in" in finding.reason) is leaks
    explained = {result.name for result in report.checks if result.state == "explained"}
    assert ("causality" in explained) is leaks


class Packed(nn.Module):
    """One layer of attention over packed documents, and over a prefix."""

    def __init__(self, fault):
        super().__init__()
        self.tok, self.pos, self.fault = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH), fault
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, documents=None, prefix=None):
        (B, T), places = ids.shape, torch.arange(ids.shape[1]).expand(ids.shape)
        mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
        if documents is not None:
            same = documents[:, :, None] == documents[:, None, :]
            places = (same & mask).sum(-1) - 1
            mask = mask if self.fault == "documents" else mask & same
        if prefix is not None:
            mask = torch.ones_like(mask) if self.fault == "prefix" else mask | prefix[:, None, :]
        q, k, v = self.qkv(self.tok(ids) + self.pos(places)).split(WIDTH, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@pytest.mark.parametrize(("fault", "expected"), [(None, []), ("documents", ["packing"]), ("prefix", ["prefix"])])
def test_packed_documents_and_a_prefix_can_be_handed_over(fault, expected):
    report = build(Packed, fault, documents_argument="documents", prefix_argument="prefix")
    assert [finding.check for finding in report.findings] == expected
    assert {"packing", "prefix"} <= {result.name for result in report.checks}
    rows = {row.check: row.how for row in build(Packed, fault).not_checked}
    assert "documents_argument=" in rows["packing"]
    assert "prefix_argument=" in rows["prefix"]


def divide_by_zero(logits, labels):
    raise ZeroDivisionError("division by zero")


IDS = torch.randint(1, VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "casual"}, "did you mean 'causal'"),
        ({"mask_argument": "atention_mask"}, "no such argument.*did you mean 'attention_mask'"),
        ({"documents_argument": "docs"}, "no such argument"),
        ({"pad_id": 61}, "pad_id=61 is not a token id of the model, whose ids are 0 to 60"),
        ({"batch": IDS}, r"batch= takes two tensors, \(ids, labels\)"),
        ({"batch": (IDS, IDS[:1])}, "as many rows"),
        ({"batch": (IDS, IDS), "loss": divide_by_zero}, r"loss\(logits, labels\) failed .*division by zero"),
        ({"length": 0}, "length=0 is too short"),
        ({"length": -3}, "length=-3 is too short"),
        ({"window": 0}, "window=0"),
        ({"checks": "causality,casuality"}, "there is no check 'casuality'; did you mean 'causality'"),
    ],
)
def test_misuse_is_refused_in_one_line(options, message):
    with pytest.raises(mb.InputError, match=message) as caught:
        mb.diagnose(GPT(), **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_class_is_refused_and_a_string_names_checks():
    with pytest.raises(mb.InputError, match="GPT is a class; give an instance"):
        mb.diagnose(GPT)
    report = mb.diagnose(GPT(), checks="causality, dropout")
    assert {result.name for result in report.checks} == {"causality", "dropout"}


class Table(nn.Module):
    """Learned positions from a table with this many rows, of which the first used one is `first`."""

    def __init__(self, rows, first):
        super().__init__()
        self.first, self.token, self.position = first, nn.Embedding(VOCAB, WIDTH), nn.Embedding(rows, WIDTH)
        self.attention, self.head = Attention(), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]) + self.first)
        return self.head(x + self.attention(x))


@pytest.mark.parametrize(
    ("rows", "first", "found"), [(9, 0, False), (10, 0, False), (11, 2, False), (10, 1, False), (12, 1, True)]
)
def test_a_position_table_may_have_spare_rows(rows, first, found):
    torch.manual_seed(0)
    checks = [finding.check for finding in mb.diagnose(Table(rows, first), vocab=VOCAB, length=9).findings]
    assert ("position_offset" in checks) is found
