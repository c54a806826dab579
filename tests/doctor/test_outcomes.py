"""What a report says beside findings: what a model does not support, what does not apply, what to pass."""

import html
import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from students import page_of
from torch import nn

import monoblock as mb
from monoblock.doctor.checks import CHECKS
from monoblock.doctor.dependence import Panels, measure
from monoblock.doctor.faults import diagnose_with_fault
from monoblock.doctor.options import DiagnoseOptions
from monoblock.doctor.report import NotChecked, describe_not_checked, draw_panels

VOCAB, WIDTH, HEADS, DEPTH, CONTEXT = 61, 36, 4, 3, 64


class GPT(nn.Module):
    """A decoder; each subclass changes how it is embedded, masked or called."""

    def __init__(self, fault=None):
        super().__init__()
        self.fault = fault
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(DEPTH))
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def places(self, T):
        return self.position(torch.arange(T))

    def attend(self, layer, x, mask):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv[layer](x).chunk(3, -1))
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~mask, -math.inf)
        return self.mix[layer]((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, WIDTH))

    def blocks(self, x, mask):
        for layer in range(DEPTH):
            x = x + self.attend(layer, self.norms[layer](x), mask)
        return x

    def mask(self, T, keep=None):
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        return mask if keep is None else (mask & keep.bool()[:, None, None, :]) | torch.eye(T, dtype=torch.bool)

    def forward(self, ids):
        T = ids.shape[1]
        return self.head(self.blocks(self.token(ids) + self.places(T), self.mask(T)))


class Masked(GPT):
    """Takes a mask, and counts positions with the padding."""

    def forward(self, ids, attention_mask=None):
        T = ids.shape[1]
        return self.head(self.blocks(self.token(ids) + self.places(T), self.mask(T, attention_mask)))


class NanAtPadding(Masked):
    def mask(self, T, keep=None):
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        return mask if keep is None else mask & keep.bool()[:, None, None, :]


class MaskMissesALayer(Masked):
    def attend(self, layer, x, mask):
        return super().attend(layer, x, super().mask(x.shape[1]) if layer == 1 else mask)


class TakesPositions(GPT):
    """Takes positions; with the fault it ignores them."""

    def forward(self, ids, attention_mask=None, position_ids=None):
        T = ids.shape[1]
        places = torch.arange(T) if position_ids is None or self.fault else position_ids
        return self.head(self.blocks(self.token(ids) + self.position(places), self.mask(T, attention_mask)))


class NeedsPositions(TakesPositions):
    def forward(self, ids, position_ids, attention_mask=None):
        return super().forward(ids, attention_mask, position_ids)


class PicksOutputs(Masked):
    """The argument names the outputs to return, not the positions of the tokens."""

    def forward(self, ids, attention_mask=None, positions=None):
        logits = super().forward(ids, attention_mask)
        return logits if positions is None else logits.gather(1, positions[..., None].expand(-1, -1, VOCAB))


class EveryLayer(GPT):
    """Adds the positions again in every layer: to the residual stream, or for the mended twin to queries and keys."""

    def blocks(self, x, mask):
        places = self.places(x.shape[1])
        for layer in range(DEPTH):
            if self.fault:
                x = x + places
            x = x + self.attend(layer, self.norms[layer](x) + (0 if self.fault else places), mask)
        return x

    def forward(self, ids):
        return self.head(self.blocks(self.token(ids), self.mask(ids.shape[1])))


class Alibi(GPT):
    """Grouped keys and values, biases that fall with the distance, a tied head, a dictionary as output."""

    def __init__(self, fault=None):
        super().__init__(fault)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.token.weight

    def attend(self, layer, x, mask):
        (B, T, _), K = x.shape, WIDTH // HEADS
        q, k, v = self.qkv[layer](x).view(B, T, 2 * HEADS, K).transpose(1, 2).split((HEADS, 2, 2), 1)
        k, v = (t.repeat_interleave(HEADS // 2, 1) for t in (k, v))
        places = torch.arange(T)
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        bias = slopes[:, None, None] * (places[None, :] - places[:, None])
        scores = (q @ k.mT / math.sqrt(K) + bias).masked_fill(~mask, -math.inf)
        return self.mix[layer]((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, WIDTH))

    def forward(self, ids, attention_mask=None):
        T = ids.shape[1]
        return {"loss": None, "logits": self.head(self.blocks(self.token(ids), self.mask(T, attention_mask)))}


class Relative(GPT):
    """A table of relative positions, as in T5: the row of a pair depends on its distance."""

    def __init__(self, fault=None):
        super().__init__(fault)
        self.table = nn.Embedding(2 * CONTEXT, HEADS)

    def attend(self, layer, x, mask):
        B, T, _ = x.shape
        places = torch.arange(T)
        bias = self.table(places[None, :] - places[:, None] + CONTEXT).permute(2, 0, 1)
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv[layer](x).chunk(3, -1))
        scores = (q @ k.mT / math.sqrt(q.size(-1)) + bias).masked_fill(~mask, -math.inf)
        return self.mix[layer]((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, WIDTH))

    def forward(self, ids):
        return self.head(self.blocks(self.token(ids), self.mask(ids.shape[1])))


class Cosine(GPT):
    """Attention by the cosine of queries and keys, times a temperature."""

    def attend(self, layer, x, mask):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv[layer](x).chunk(3, -1))
        scores = (10 * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).masked_fill(~mask, -math.inf)
        return self.mix[layer]((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, WIDTH))


class Capacity(GPT):
    """Experts; with the fault, each takes a number of tokens of the whole batch, and later rows go without."""

    def __init__(self, fault=None):
        super().__init__(fault)
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def blocks(self, x, mask):
        x = super().blocks(x, mask)
        flat = x.flatten(0, 1)
        share, chosen = self.gate(flat).softmax(-1).max(-1)
        added = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero()[: 9 if self.fault else None, 0]
            added[places] = share[places, None] * expert(flat[places])
        return x + added.view_as(x)


class Cached(GPT):
    """Returns a tuple of logits and cache."""

    def forward(self, ids, past=None):
        (B, T), n = ids.shape, 0 if past is None else past[0][0].shape[2]
        x = self.token(ids) + self.position(torch.arange(T) + (0 if self.fault else n))
        state = []
        for layer in range(DEPTH):
            projected = self.qkv[layer](self.norms[layer](x)).chunk(3, -1)
            q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in projected)
            if past is not None:
                k, v = (torch.cat((old, new), 2) for old, new in zip(past[layer], (k, v), strict=True))
            state.append((k, v))
            mask = torch.ones(T, n + T, dtype=torch.bool).tril(n)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + self.mix[layer](y.transpose(1, 2).reshape(B, T, WIDTH))
        return self.head(x), state


class TimeFirst(GPT):
    def forward(self, ids):
        return super().forward(ids).transpose(0, 1)


class ClassesSecond(GPT):
    def forward(self, ids):
        return super().forward(ids).transpose(1, 2)


class Flat(GPT):
    def forward(self, ids):
        return super().forward(ids).flatten(0, 1)


def examine(model, fault=None, **options):
    torch.manual_seed(0)
    return mb.diagnose(model(fault), **options)


def found(report):
    return [(finding.check, finding.verdict) for finding in report.findings]


def states(report):
    return {result.name: result.state for result in report.checks}


# -- padding on the left --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "words", "fix"),
    [
        (Masked, {}, "takes no position ids", "position_ids = (mask.cumsum(1) - 1).clamp(min=0)"),
        (NanAtPadding, {}, "its softmax is NaN", "let padding see itself"),
        (GPT, {"pad_id": 0}, "tokens attend to it, and positions count it", "take a mask and hide the padding"),
    ],
)
def test_padding_on_the_left_that_is_not_supported_has_a_line_of_its_own(model, options, words, fix, tmp_path):
    report = examine(model, **options)
    assert (report.findings, report.ok) == ([], True)
    (limit,) = report.unsupported
    assert (limit.check, limit.verdict, limit.evidence["difference_right"]) == ("padding", "unsupported", 0)
    assert limit.evidence["difference_left"] > 0.1
    assert words in limit.reason
    assert fix in limit.fix
    assert states(report)["padding"] == "unsupported"
    text = str(report)
    assert "NOT SUPPORTED  padding" in text
    assert ", 1 not supported (" in text.splitlines()[0]
    assert "padding" not in next(line for line in text.splitlines() if line.startswith("passed"))
    assert report.to_dict()["unsupported"][0]["check"] == "padding"
    assert "NOT SUPPORTED  padding" in page_of(report, tmp_path)


@pytest.mark.parametrize("model", [TakesPositions, NeedsPositions])
def test_a_model_that_takes_positions_is_given_those_of_the_mask(model):
    report = examine(model)
    assert (found(report), report.unsupported, states(report)["padding"]) == ([], [], "passed")
    (finding,) = examine(model, "ignored", checks="padding").findings if model is TakesPositions else [None]
    assert finding is None or "positions count the padding" in finding.reason


def test_an_argument_that_picks_outputs_is_not_taken_for_positions():
    report = examine(PicksOutputs)
    assert (found(report), states(report)["padding"]) == ([], "unsupported")


def test_a_mask_that_does_not_reach_a_layer_of_a_decoder_is_found_by_padding_on_the_left():
    report = examine(MaskMissesALayer)
    assert found(report) == [("padding", "fail")]
    assert "attend to padding on the left in layer 1" in report.findings[0].reason


# -- positions ------------------------------------------------------------------------------------------------------


def test_checks_of_positions_say_if_there_is_nothing_to_check():
    report = examine(Alibi)
    assert found(report) == []
    assert states(report)["positions"] == "passed"  # it ran: the biases tell places apart
    reasons = {row.check: row.reason for row in report.not_checked if not row.how}
    assert reasons["positions_twice"] == "no positions are added to vectors, and no queries rotated"
    assert reasons["position_offset"] == "no table of positions is read"
    assert not {"positions_twice", "position_offset"} & set(states(report))
    assert "does not apply: positions_twice (no positions are added" in str(report)


def test_a_configuration_without_positions_is_not_said_to_have_passed():
    config = mb.vary(mb.tiny("gpt2"), positions="none")
    report = mb.diagnose(mb.Transformer(config))
    reasons = {row.check: row.reason for row in report.not_checked}
    assert reasons["positions"] == "the configuration says that the model has no positions"
    assert {"positions", "positions_twice", "position_offset"} <= set(reasons)


def test_positions_added_in_every_layer_are_found_and_those_of_queries_and_keys_are_not():
    report = examine(EveryLayer, "stream")
    assert found(report) == [("positions_twice", "fail")]
    (finding,) = report.findings
    assert "added 3 times, again between the layers" in finding.reason
    assert (finding.evidence["times"], finding.evidence["attentions_before"]) == (3, "0, 1, 2")
    assert found(examine(EveryLayer)) == []


def test_every_check_is_either_run_or_listed_with_its_reason():
    for report in (examine(GPT), examine(Alibi), mb.diagnose(mb.Transformer(mb.tiny("t5-small")))):
        names = [*(result.name for result in report.checks), *(row.check for row in report.not_checked)]
        assert sorted(names) == sorted(check.name for check in CHECKS)


# -- further models of students ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Relative, Cosine, Capacity, Alibi])
def test_a_healthy_model_of_another_style_has_no_findings(model):
    assert found(examine(model)) == []


def test_a_cache_in_a_tuple_is_compared():
    for fault, expected in ((None, []), ("position", [("cache", "fail")])):
        torch.manual_seed(0)
        model = Cached(fault)
        assert found(mb.diagnose(model, cached=model)) == expected


def test_a_capacity_of_experts_that_counts_the_whole_batch_is_found():
    assert found(examine(Capacity, "batch")) == [("batch", "fail")]


@pytest.mark.parametrize("model", [TimeFirst, ClassesSecond, Flat])
def test_outputs_may_have_their_axes_in_another_order(model):
    report = examine(model)
    assert (found(report), states(report)["causality"]) == ([], "passed")
    torch.manual_seed(0)
    leaking = model()
    leaking.mask = lambda T, keep=None: torch.ones(T, T, dtype=torch.bool).tril(1)
    assert found(mb.diagnose(leaking)) == [("causality", "fail")]


# -- decoding options -----------------------------------------------------------------------------------------------


def small_gpt2(**fields):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, **sizes, **fields)).eval()


@pytest.mark.parametrize(
    ("options", "verdict", "words"),
    [
        ({"eos_token_id": 99}, "fail", "eos_token_id=99 is not an id"),
        ({"pad_token_id": [3, 77]}, "fail", "pad_token_id=77 is not an id"),
        ({"max_length": 65}, "warn", "beyond the context of 64 tokens"),
        ({"max_length": 20}, "warn", "counts the prompt too"),
        ({"max_new_tokens": 65}, "fail", "more new tokens"),
        ({"max_new_tokens": 4, "min_new_tokens": 9}, "fail", "the least length is more than the greatest"),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, "warn", "temperature, top_p change nothing"),
        ({"do_sample": True, "temperature": 0.0}, "fail", "a temperature of 0"),
        ({"top_p": 1.5, "do_sample": True}, "fail", "top_p=1.5 is not possible"),
        ({"repetition_penalty": 5.0}, "warn", "almost forbidden"),
        ({"repetition_penalty": 0.5}, "warn", "repetition is rewarded"),
        ({"no_repeat_ngram_size": 1}, "warn", "no token may occur twice"),
        ({"num_return_sequences": 3}, "fail", "as many different texts as beams"),
        ({"num_beams": 4, "num_return_sequences": 3, "eos_token_id": 2, "max_new_tokens": 30}, None, ""),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}, None, ""),
    ],
)
def test_the_generation_config_of_a_model_of_transformers_is_read(options, verdict, words):
    model = small_gpt2(bos_token_id=None, eos_token_id=None)
    model.generation_config._from_model_config = False
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    report = mb.diagnose(model, checks="generation_defaults")
    assert [finding.verdict for finding in report.findings] == ([] if verdict is None else [verdict])
    assert all(words in finding.reason for finding in report.findings)


def test_ids_that_are_only_the_default_of_a_configuration_class_are_a_note():
    report = mb.diagnose(small_gpt2(), checks="generation_defaults")
    assert report.findings == []
    assert any("eos_token_id=50256 is the default of the configuration class" in note for note in report.notes)


def test_the_generation_config_of_a_folder_is_read_as_it_is_written(tmp_path):
    torch.manual_seed(0)
    mb.export_hf(mb.Transformer(mb.tiny("llama-7b")), tmp_path)
    path = tmp_path / "generation_config.json"
    for options, expected in (
        ({"eos_token_id": 2, "temperature": 0.6, "top_p": 0.9}, [("generation_defaults", "warn")]),
        ({"eos_token_id": 2, "do_sample": True, "temperature": -1.0}, [("generation_defaults", "fail")]),
        ({"eos_token_id": 2, "do_sample": True, "temperature": 0.6}, []),
    ):
        path.write_text(json.dumps(options))
        assert found(mb.diagnose(tmp_path)) == expected


# -- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [("vocabulary", "did you mean 'vocab'"), ("pad_idx", "did you mean 'pad_id'"), ("zzz", "it takes vocab, length")],
)
def test_an_unknown_argument_is_one_line_with_the_nearest_name(name, words):
    with pytest.raises(mb.InputError, match=f"mb.diagnose has no argument '{name}'; {words}") as caught:
        mb.diagnose(GPT(), **{name: 3})
    assert "\n" not in str(caught.value)
    with pytest.raises(mb.InputError, match="no argument"):
        mb.diagnose("no/such/folder", **{name: 3})


def test_every_argument_is_explained():
    explained = mb.diagnose.__doc__
    assert all(f"{name}" in explained for name in DiagnoseOptions.__annotations__)


# -- what was not checked -------------------------------------------------------------------------------------------


def test_what_else_could_be_handed_over_is_one_line_with_every_argument(tmp_path):
    report = examine(GPT)
    (line,) = (line for line in str(report).splitlines() if "pass to mb.diagnose" in line)
    assert line == str(report).splitlines()[-1]
    for argument in ("pad_id=0", "cached=f", "batch=(ids, labels)", "step=f", "optimizer=…", "tokenizer=…"):
        assert argument in line
    assert "if the model has it" in line
    assert line.index("step=f") < line.index("if the model has it") < line.index("window=4 (a window)")
    assert f"<p>{html.escape(line)}</p>" in page_of(report, tmp_path)
    rows = report.to_dict()["not_checked"]
    assert len(rows) == len(report.not_checked)
    assert "batch=(ids, labels)" in next(row["how"] for row in rows if row["check"] == "overfit")


def test_a_check_that_failed_keeps_a_line_of_its_own():
    rows = [
        NotChecked("the model failed: x", "call it", check="a"),
        NotChecked("no", "pass c=1", "c=1", check="b"),
        NotChecked("none", check="d"),
        NotChecked("no", "pass f=2", "f=2", "wings", "e"),
    ]
    failed, inapplicable, last = describe_not_checked(rows)
    assert (failed, inapplicable) == ("a: the model failed: x; call it", "does not apply: d (none)")
    assert last == "to check more, pass to mb.diagnose c=1; if the model has it f=2 (wings)"


# -- pictures -------------------------------------------------------------------------------------------------------


def test_the_dependence_of_outputs_on_tokens_is_measured():
    ids = torch.randint(5, VOCAB, (1, 7), generator=torch.Generator().manual_seed(0))
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))

    def shifted(rows):  # output i depends on the tokens i and i - 2
        return table[rows] + torch.cat((torch.zeros(len(rows), 2, VOCAB), table[rows[:, :-2]]), 1)

    change = measure(shifted, ids, (ids + 1) % VOCAB, range(7))
    expected = torch.eye(7, dtype=torch.bool) | torch.eye(7, dtype=torch.bool).roll(2, 0).tril(-2)
    assert torch.equal(change > 0, expected)


STRUCTURE = {
    "no_causal_mask": 253,  # pairs of 23 tokens in which a token sees a later one
    "mask_off_by_one": 22 + 21,  # through two layers, two tokens ahead
    "window_forgotten": 105,  # pairs further apart than the windows of two layers reach
    "packing_leak": 66 + 77,  # positions start again, so that the first document sees the second as well
    "batch_norm": 6,
    "source_padding_in_cross": 3 * 23,
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_a_finding_of_structure_has_a_picture_of_what_depends_on_what(name, tmp_path):
    report = diagnose_with_fault(name)
    (picture,) = (p for p in report.pictures.values() if isinstance(p, Panels))
    assert picture.check == report.findings[0].check
    measured, expected = picture.panels[:2]
    assert (measured.title, expected.title) == ("measured", "expected")
    wrong = [
        (row, column)
        for row, (values, allowed) in enumerate(zip(measured.values, measured.allowed, strict=True))
        for column, value in enumerate(values)
        if value > 0 and not allowed[column]
    ]
    assert len(wrong) == STRUCTURE[name]
    page = page_of(report, tmp_path)
    begin = page.index("<h2>FAIL  ")
    assert page[begin : page.index("</section>", begin)].count("<img") == 1
    (image,) = draw_panels(picture).axes[0].images
    colours = image.get_array().reshape(-1, 4)
    assert ((colours[:, :3] == [0xD5 / 255, 0x5E / 255, 0]).all(-1) & (colours[:, 3] > 0)).sum() == len(wrong)


def test_a_healthy_model_has_one_picture_with_its_attention(tmp_path):
    report = examine(GPT)
    (picture,) = (p for p in report.pictures.values() if isinstance(p, Panels))
    assert [panel.title for panel in picture.panels] == ["measured", "expected", "attention, layer 0"]
    assert picture.check is None
    for panel in picture.panels:
        cells = zip(itertools.chain(*panel.values), itertools.chain(*panel.allowed), strict=True)
        assert max(value for value, allowed in cells if not allowed) == 0
    page = page_of(report, tmp_path)
    assert "Which tokens the output at each position depends on" in page


def test_a_function_of_ids_has_a_picture_too():
    torch.manual_seed(0)
    model = GPT()
    report = mb.diagnose(lambda ids: model(ids), vocab=VOCAB, length=24)
    assert any(isinstance(picture, Panels) for picture in report.pictures.values())
