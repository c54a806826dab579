"""Traces record and edit activations of the real forward pass, in monoblock and in transformers models."""

import copy
from collections import Counter, UserDict

import pytest
import torch
from support import random_tokens
from torch.utils._python_dispatch import TorchDispatchMode

import monoblock as mb
from monoblock.config.presets import PRESETS
from monoblock.inspection.edits import Layout
from monoblock.inspection.trace import TraceTap, attach_tap, mean_activations

IDS = torch.randint(1, 61, (3, 13), generator=torch.Generator().manual_seed(5))
HEADS = "decoder.1.attention.heads"


def inputs_of(config):
    if config.family == "vision":
        size = config.input.image
        return (torch.linspace(-1, 1, 3 * 3 * size * size).view(3, 3, size, size),)
    if not hasattr(config.input, "vocab"):
        return None
    return (IDS[:, :11], IDS) if config.family == "encoder-decoder" else (IDS,)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return mb.Transformer(mb.gpt(vocab=61, width=36, depth=3, heads=3, context=23)).eval()


@pytest.mark.parametrize("name", PRESETS)
def test_reading_the_weights_changes_no_bit_and_rows_sum_to_one(name):
    torch.manual_seed(3)
    config = mb.tiny(name)
    inputs = inputs_of(config)
    if inputs is None:
        pytest.skip("audio")
    model = mb.Transformer(config).eval()
    seen = mb.trace(model, *inputs, names=["*.weights", "*.scores"])
    with torch.no_grad():
        assert torch.equal(seen.logits, model(*inputs))
    weights = {key: value for key, value in seen.items() if key.endswith("weights")}
    assert len(weights) == sum(
        1 + (block.cross is not None) for stack in config.stacks.values() for block in stack.layers()
    )
    sinks = any(block.attention.sinks for stack in config.stacks.values() for block in stack.layers())
    for tensor in weights.values():
        total = tensor.sum(-1)
        assert (total <= 1 + 1e-6).all() if sinks else torch.allclose(total, torch.ones_like(total), rtol=0, atol=1e-6)


class PlainPath:
    """A tap that may change every activation, so that the model runs the plain attention."""

    def __init__(self):
        self.weights = {}

    def __call__(self, name, tensor):
        if name.endswith("weights"):
            self.weights[name] = tensor
        return tensor


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "t5-small", "llama3-8b", "gemma2-2b", "vit-b16"])
def test_weights_equal_those_of_the_plain_path(name):
    torch.manual_seed(3)
    model = mb.Transformer(mb.tiny(name)).eval()
    inputs, plain = inputs_of(model.config), PlainPath()
    with torch.no_grad():
        logits = model(*inputs, tap=plain)
    seen = mb.trace(model, *inputs, names="*.weights")
    assert seen.keys() == plain.weights.keys()
    for key, weights in seen.items():
        torch.testing.assert_close(weights, plain.weights[key], rtol=0, atol=1e-6)
    torch.testing.assert_close(seen.logits, logits, rtol=0, atol=2e-5)


def test_only_the_layers_that_are_asked_for_compute_weights(model):
    with torch.no_grad():
        tap = TraceTap("decoder.2.attention.weights")
        model(IDS, tap=tap)
    assert "decoder.2.attention.weights" in tap.names
    assert "decoder.1.attention.weights" not in tap.names


@pytest.mark.parametrize("names", [HEADS, "decoder.*.output", "decoder.0.feedforward.hidden", "*.key"])
def test_patching_with_the_same_run_changes_no_bit(model, names):
    seen = mb.trace(model, IDS, names=names)
    patched = mb.trace(model, IDS, edits=mb.patch(names, seen), names="head.logits")
    assert torch.equal(patched.logits, model(IDS))


def test_patching_one_head_with_itself_changes_no_bit_and_with_another_run_changes_it(model):
    seen, other = mb.trace(model, IDS, names=HEADS), mb.trace(model, IDS.flip(1), names=HEADS)
    same = mb.trace(model, IDS, edits=mb.patch(HEADS, seen, heads=[1]))
    assert torch.equal(same.logits, model(IDS))
    changed = mb.trace(model, IDS, edits=mb.patch(HEADS, other, heads=[1], positions=[7]))
    assert torch.equal(changed.logits[:, :7], same.logits[:, :7])
    assert not torch.allclose(changed.logits[:, 7:], same.logits[:, 7:])
    expected = seen[HEADS].clone()
    expected[:, 1, 7] = other[HEADS][:, 1, 7]
    assert torch.equal(changed[HEADS], expected)


def test_patched_weights_are_used(model):
    name = "decoder.1.attention.weights"
    uniform = torch.ones(3, 3, 13, 13).tril()
    uniform /= uniform.sum(-1, keepdim=True)
    seen = mb.trace(model, IDS, names=["*.value", HEADS], edits=mb.patch(name, {name: uniform}))
    torch.testing.assert_close(seen[HEADS], uniform @ seen["decoder.1.attention.value"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["zero", "mean", "resample"])
def test_ablations_do_what_they_say(model, method):
    before = mb.trace(model, IDS, names=HEADS)[HEADS]
    after = mb.trace(model, IDS, names=HEADS, edits=mb.ablate(HEADS, method, heads=[2]))[HEADS]
    expected = {
        "zero": torch.zeros_like(before),
        "mean": before.mean((0, 2), keepdim=True).expand_as(before),
        "resample": before.roll(1, 0),
    }[method]
    assert torch.equal(after[:, 2], expected[:, 2])
    assert torch.equal(after[:, :2], before[:, :2])


def test_a_vector_is_added_at_positions(model):
    vector = torch.arange(36.0)
    edit = mb.add_vector("decoder.0.output", vector, positions=[-1])
    before = mb.trace(model, IDS, names="decoder.*.output")
    after = mb.trace(model, IDS, names="decoder.*.output", edits=[edit])
    difference = after["decoder.0.output"] - before["decoder.0.output"]
    torch.testing.assert_close(difference[:, -1], vector.expand(3, 36), rtol=0, atol=1e-5)
    assert not difference[:, :-1].any()
    assert not torch.allclose(before["decoder.2.output"][:, -1], after["decoder.2.output"][:, -1])


def test_gradients_of_activations(model):
    seen = mb.trace(model, IDS, names=[HEADS, "*.weights"], gradients=True)
    seen.logits[:, -1].square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in seen.values())
    model.zero_grad()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": "decoder.9.*"}, "no activation matches decoder.9.*; write patterns for names such as input.token"),
        ({"edits": mb.ablate("encoder.*")}, "no activation matches encoder.*"),
        ({"edits": mb.ablate("decoder.0.output", heads=[0])}, "no axis of heads"),
        ({"edits": mb.ablate(HEADS, heads=[3])}, "has heads 0 to 2"),
        ({"edits": mb.patch(HEADS, {})}, "has no activation decoder.1.attention.heads"),
        ({"edits": mb.patch(HEADS, {HEADS: torch.zeros(2)})}, "inputs of the same shape"),
        ({"edits": mb.add_vector(HEADS, torch.zeros(7))}, "give one of size 12"),
    ],
)
def test_a_wrong_request_is_refused(model, options, message):
    with pytest.raises(mb.InputError, match=message.replace("*", r"\*")):
        mb.trace(model, IDS, **options)


def test_resampling_needs_two_rows(model):
    with pytest.raises(mb.InputError, match="at least two rows"):
        mb.trace(model, IDS[:1], edits=mb.ablate(HEADS, "resample"))
    with pytest.raises(mb.InputError, match="write one of zero, mean, resample"):
        mb.ablate(HEADS, "nothing")


def test_a_compiled_model_is_refused(model):
    with pytest.raises(mb.InputError, match="; trace the original"):
        mb.trace(torch.compile(model, backend="eager"), IDS)
    in_place = copy.deepcopy(model)
    in_place.decoder.get_submodule("1").compile(backend="eager")
    with pytest.raises(mb.InputError, match=r"decoder.1 was compiled by .compile\(\)"):
        mb.trace(in_place, IDS)


class OperatorCounter(TorchDispatchMode):
    """Count the operators that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_model_that_is_traced_elsewhere_or_not_at_all_runs_the_same_operators(model):
    """An unused trace costs nothing: not before, not after, and a trace of one layer nothing in the others."""

    def count(run):
        with torch.no_grad(), OperatorCounter() as counter:
            run()
        return counter.counts - Counter({"aten.detach.default": 99})

    before = count(lambda: model(IDS))
    one_activation = count(lambda: mb.trace(model, IDS, names="decoder.0.input"))
    one_layer = count(lambda: mb.trace(model, IDS, names="decoder.0.attention.weights"))
    all_layers = count(lambda: mb.trace(model, IDS, names="*.weights"))
    assert one_activation == before == count(lambda: model(IDS))
    assert (
        {name: 3 * extra for name, extra in (one_layer - before).items() if "softmax" in name}
        == {name: extra for name, extra in (all_layers - before).items() if "softmax" in name}
        != {}
    )


def test_a_trace_leaves_nothing_behind(model):
    before = set(vars(model))
    mb.trace(model, IDS, names="*", edits=mb.ablate(HEADS))
    with pytest.raises(mb.InputError):
        mb.trace(model, IDS, names="nothing")
    assert set(vars(model)) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_edits_hold_for_every_pass_inside_the_block(model):
    tap = TraceTap(edits=[mb.ablate(HEADS, heads=[0])])
    with torch.no_grad():
        plain = model(IDS)
        with attach_tap(model, tap):
            edited = model(IDS)
        assert torch.equal(model(IDS), plain)
    assert torch.equal(edited, mb.trace(model, IDS, edits=mb.ablate(HEADS, heads=[0])).logits)


# -- transformers models ------------------------------------------------------------------------------------------


def hugging_face_model(kind, implementation):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "attn_implementation": implementation}
    torch.manual_seed(3)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=36, n_layer=2, n_head=3, n_positions=29, **sizes)
        return transformers.GPT2LMHeadModel(config).eval(), "transformer.h.1.attn"
    if kind == "t5":
        config = transformers.T5Config(d_model=36, d_kv=12, d_ff=46, num_layers=2, num_heads=3, **sizes)
        return transformers.T5EncoderModel(config).eval(), "encoder.block.1.layer.0.SelfAttention"
    sizes |= {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 46}
    if kind == "llama":
        config = transformers.LlamaConfig(num_key_value_heads=2, **sizes)
        return transformers.LlamaForCausalLM(config).eval(), "model.layers.1.self_attn"
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval(), "bert.encoder.layer.1.attention.self"


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "t5"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_transformers_model_is_traced_by_hooks(kind, implementation):
    model, attention = hugging_face_model(kind, implementation)
    ids = random_tokens(2, 13)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.no_grad():
        output = model(ids, attention_mask=mask)
        expected = output.logits if hasattr(output, "logits") else output.last_hidden_state
    seen = mb.trace(model, ids, attention_mask=mask, names=["*.weights", "*.heads"])
    assert torch.equal(seen.logits, expected)
    model.config._attn_implementation = "eager"  # the reference
    with torch.no_grad():
        reference = model(ids, attention_mask=mask, output_attentions=True).attentions
    model.config._attn_implementation = implementation
    torch.testing.assert_close(seen[f"{attention}.weights"][0], reference[1][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(seen[f"{attention}.weights"][1, :, :9], reference[1][1, :, :9], rtol=0, atol=1e-6)
    same = mb.trace(model, ids, attention_mask=mask, edits=mb.patch(f"{attention}.heads", seen, heads=[1]))
    assert torch.equal(same.logits, expected)
    zero = mb.trace(
        model, ids, attention_mask=mask, edits=mb.ablate(f"{attention}.weights", heads=[1]), names="*.heads"
    )
    assert not zero[f"{attention}.heads"][:, 1].any()
    torch.testing.assert_close(zero[f"{attention}.heads"][0, 0], seen[f"{attention}.heads"][0, 0], rtol=0, atol=1e-5)
    assert torch.equal(mb.trace(model, ids, attention_mask=mask, names=attention).logits, expected)


def test_a_name_that_was_not_recorded_is_an_error_with_a_hint(model):
    seen = mb.trace(model, random_tokens(2, 13), names="decoder.*.output")
    with pytest.raises(KeyError, match=r"did you mean 'decoder\.0\.output'"):
        seen["decoder.0.outpt"]
    with pytest.raises(KeyError, match="give it in names="):
        seen["logits"]


# -- axes and padding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_activation_declares_its_axes(name):
    torch.manual_seed(3)
    model = mb.Transformer(mb.tiny(name)).eval()
    inputs = inputs_of(model.config)
    if inputs is None:
        pytest.skip("audio")
    seen, layout = mb.trace(model, *inputs), Layout(model)
    blocks = [block for stack in model.config.stacks.values() for block in stack.layers()]
    attentions = [one for block in blocks for one in (block.attention, block.cross) if one is not None]
    sizes = {"B": {3}, "H": {one.heads for one in attentions}, "G": {one.num_kv_heads for one in attentions}}
    if model.config.family != "vision":
        sizes |= {"T": {tensor.shape[1] for tensor in inputs}, "S": {tensor.shape[1] for tensor in inputs}}
    for key, tensor in seen.items():
        axes = layout.axes(key, tensor)
        assert axes is not None, key
        assert len(axes) == tensor.dim(), (key, axes)
        for letter, size in zip(axes, tensor.shape, strict=True):
            assert size in sizes.get(letter, {size}), (key, axes, tensor.shape)


def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = {"hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 46}
    return transformers.BertModel(transformers.BertConfig(vocab_size=61, **sizes)).eval()


QUERY = "encoder.layer.0.attention.self.query"  # (B, T, D) in transformers, (B, H, T, K) in monoblock


@pytest.mark.parametrize("method", ["zero", "mean", "resample"])
@pytest.mark.parametrize("part", [{"heads": [1]}, {"positions": [1]}, {"heads": [1], "positions": [1]}])
def test_heads_and_positions_of_a_foreign_module_are_refused_because_its_axes_are_not_known(method, part):
    with pytest.raises(
        mb.InputError, match=r"it is not known which axis .*(name its axes, such as axes=|are NAME\.heads)"
    ):
        mb.trace(bert(), IDS, names=QUERY, edits=mb.ablate(QUERY, method, **part))


def test_axes_of_a_foreign_module_can_be_given():
    model = bert()
    plain = mb.trace(model, IDS, names=QUERY)[QUERY]
    after = mb.trace(model, IDS, names=QUERY, edits=mb.ablate(QUERY, positions=[1], axes="BTD"))[QUERY]
    assert not after[:, 1].any()
    assert torch.equal(after[:, 2:], plain[:, 2:])
    after = mb.trace(model, IDS, names=QUERY, edits=mb.ablate(QUERY, "mean", axes="BTD"))[QUERY]
    torch.testing.assert_close(after, plain.mean((0, 1), keepdim=True).expand_as(plain), rtol=0, atol=1e-6)
    with pytest.raises(mb.InputError, match="has no axis of heads"):
        mb.trace(model, IDS, edits=mb.ablate(QUERY, heads=[1], axes="BTD"))
    with pytest.raises(mb.InputError, match="does not have the axes 'BHTK'; give a letter for each"):
        mb.trace(model, IDS, edits=mb.ablate(QUERY, heads=[1], axes="BHTK"))
    for wrong in ("BB", "B-T", ""):
        with pytest.raises(mb.InputError, match="axes are a letter for each axis"):
            mb.ablate(QUERY, axes=wrong)


def test_a_sequence_that_is_the_first_axis_is_edited_at_its_positions():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
    x = torch.randn(11, 3, 5)  # (T, B, D)
    edit = mb.ablate("0", "resample", positions=[4], axes="TBD")
    before, after = mb.trace(model, x, names="0")["0"], mb.trace(model, x, names="0", edits=edit)["0"]
    assert torch.equal(after[4], before[4].roll(1, 0))
    assert torch.equal(after[5:], before[5:])


def padded_mask(rows, length, lengths):
    return torch.arange(length).expand(rows, -1) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("name", ["decoder.1.attention.heads", "decoder.1.attention.key", "decoder.1.output"])
def test_the_mean_leaves_padding_out(model, name):
    mask = padded_mask(3, 13, [13, 5, 2])
    before = mb.trace(model, IDS, attention_mask=mask, names=name)[name]
    after = mb.trace(model, IDS, attention_mask=mask, names=name, edits=mb.ablate(name, "mean"))[name]
    tokens = torch.cat([row[..., :length, :] for row, length in zip(before, [13, 5, 2], strict=True)], -2)
    torch.testing.assert_close(after[0, ..., 3, :], tokens.mean(-2), rtol=0, atol=1e-6)


def test_the_mean_of_an_encoder_decoder_leaves_the_padding_of_its_own_sequence_out():
    torch.manual_seed(3)
    model = mb.Transformer(mb.vaswani(vocab=61, width=30, depth=2, heads=5)).eval()
    masks = {"source_mask": padded_mask(3, 13, [13, 5, 2]), "target_mask": padded_mask(3, 13, [3, 11, 7])}
    for name in (
        "encoder.1.output",
        "input.output",
        "decoder.1.cross.key",
        "decoder.1.cross.heads",
        "decoder.0.output",
    ):
        lengths = [13, 5, 2] if name.startswith(("encoder", "input")) or "key" in name else [3, 11, 7]
        before = mb.trace(model, IDS, IDS.flip(1), names=name, **masks)[name]
        after = mb.trace(model, IDS, IDS.flip(1), names=name, edits=mb.ablate(name, "mean"), **masks)[name]
        tokens = torch.cat([row[..., :length, :] for row, length in zip(before, lengths, strict=True)], -2)
        torch.testing.assert_close(after[0, ..., 1, :], tokens.mean(-2), rtol=0, atol=1e-6)


def test_the_mean_of_a_transformers_model_leaves_padding_out():
    name, mask = "encoder.layer.1.attention.self.heads", padded_mask(3, 13, [13, 5, 2])
    before = mb.trace(bert(), IDS, attention_mask=mask.long(), names=name)[name]
    after = mb.trace(bert(), IDS, attention_mask=mask.long(), names=name, edits=mb.ablate(name, "mean"))[name]
    tokens = torch.cat([row[:, :length] for row, length in zip(before, [13, 5, 2], strict=True)], 1)
    torch.testing.assert_close(after[0, :, 3], tokens.mean(1), rtol=0, atol=1e-6)


def test_the_mean_of_the_outputs_of_experts_is_over_tokens_not_experts():
    torch.manual_seed(3)
    model, name = mb.Transformer(mb.tiny("mixtral-8x7b")).eval(), "decoder.0.feedforward.outputs"
    mask = padded_mask(3, 13, [13, 5, 2])
    before = mb.trace(model, IDS, mask, names=name)[name]
    after = mb.trace(model, IDS, mask, names=name, edits=mb.ablate(name, "mean"))[name]
    torch.testing.assert_close(after[0], before[mask.flatten()].mean(0), rtol=0, atol=1e-6)
    with pytest.raises(mb.InputError, match="has no axis of positions"):
        mb.trace(model, IDS, edits=mb.ablate(name, positions=[1]))


def test_rows_with_other_padding_are_not_resampled(model):
    with pytest.raises(mb.InputError, match="give rows of equal length"):
        mb.trace(model, IDS, padded_mask(3, 13, [13, 5, 2]), edits=mb.ablate(HEADS, "resample"))


def test_a_mean_over_a_data_set_is_that_of_all_its_tokens(model):
    double = copy.deepcopy(model).double()
    batches = [(IDS, padded_mask(3, 13, [13, 5, 2])), {"source": IDS.flip(1)[:2, :7]}, IDS[:1, :3]]
    means = mean_activations(double, batches, names=[HEADS, "decoder.0.output"])
    texts = [IDS[0], IDS[1, :5], IDS[2, :2], *IDS.flip(1)[:2, :7], IDS[0, :3]]
    tokens = torch.cat([mb.trace(double, text[None], names=HEADS)[HEADS][0] for text in texts], 1)  # (H, tokens, K)
    torch.testing.assert_close(means[HEADS][0, :, 0], tokens.mean(1), rtol=0, atol=1e-10)
    edit = mb.ablate([HEADS, "decoder.0.output"], "mean", means=means, heads=None, positions=None)
    after = mb.trace(model, IDS, names=HEADS, edits=edit)[HEADS]
    torch.testing.assert_close(after[2, :, 11].double(), tokens.mean(1), rtol=0, atol=1e-6)
    one_head = mb.ablate(HEADS, "mean", means=means, heads=[1])
    after, before = mb.trace(model, IDS, names=HEADS, edits=one_head)[HEADS], mb.trace(model, IDS, names=HEADS)[HEADS]
    torch.testing.assert_close(after[2, 1, 11].double(), tokens[1].mean(0), rtol=0, atol=1e-6)
    assert torch.equal(after[:, 0], before[:, 0])


def test_wrong_means_are_refused(model):
    with pytest.raises(mb.InputError, match=r"the means have no activation decoder\.1.attention.heads"):
        mb.trace(model, IDS, edits=mb.ablate(HEADS, "mean", means={}))
    with pytest.raises(mb.InputError, match="give one that broadcasts"):
        mb.trace(model, IDS, edits=mb.ablate(HEADS, "mean", means={HEADS: torch.zeros(7)}))
    with pytest.raises(mb.InputError, match="means have no effect on the ablation 'zero'"):
        mb.ablate(HEADS, means={})
    with pytest.raises(mb.InputError, match="there is no batch"):
        mean_activations(model, [], names=HEADS)
    with pytest.raises(mb.InputError, match="give batches of one length"):
        mean_activations(model, [IDS, IDS[:, :5]], names="decoder.1.attention.weights")


def test_inputs_in_one_dictionary_are_answered_with_two_stars():
    model, ids = bert(), IDS
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for given in (inputs, UserDict(inputs)):  # a tokenizer returns the latter
        with pytest.raises(mb.InputError, match=r"input_ids, attention_mask .*; write mb\.trace\(model, \*\*inputs\)"):
            mb.trace(model, given)
    mb.trace(model, **inputs)

    class ReadsDictionary(torch.nn.Sequential):
        def forward(self, batch):
            return super().forward(batch["x"])

    reader = ReadsDictionary(torch.nn.Linear(5, 3))
    assert mb.trace(reader, {"x": torch.zeros(2, 5)}).logits.shape == (2, 3)
    with pytest.raises(mb.InputError, match=r"has the heads; the heads of an attention module .* are NAME\.heads$"):
        mb.trace(
            model, ids, edits=mb.ablate("*.query", heads=[1])
        )  # (2, 7, 24): no letters would name an axis of heads
    mb.trace(model, ids, edits=mb.ablate("*.heads", heads=[1]))
