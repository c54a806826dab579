"""Every listing of the source documents runs on the documents' classes, unchanged except for its imports.

A class of a listing computes the same from its own parts and from ours, and each of its methods works when it is pasted
into our class.
"""

import functools
import inspect

import pytest
import torch
from listings import LISTINGS, run_listing
from torch import nn

from monoblock.classic import blocks, chapter, lecture, module13

MODULES = {"A": lecture, "B": blocks, "C": module13, "E": chapter}
ROWS, T, S, WIDTH, HEADS = 2, 7, 5, 12, 3
SEEN = torch.ones(T, T).tril()  # 0: blocked
PADDING = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:, None, None]  # of S source tokens


def states(length=T):
    return torch.randn(ROWS, length, WIDTH)


def ids(vocab, length=T):
    return torch.randint(1, vocab, (ROWS, length))


# Listing, class, arguments of its constructor, and a function that makes arguments of its `forward`.
CLASSES = [
    ("A block", "TransformerBlock", (WIDTH, HEADS, 20), lambda: (states(), SEEN == 0)),
    ("A GPT", "GPT", (23, WIDTH, HEADS, 2, 16), lambda: (ids(23),)),
    ("B 03", "PositionalEncoding", (WIDTH, 16), lambda: (states(),)),
    ("B 05", "MultiHeadAttention", (WIDTH, HEADS), lambda: (states(), *[states(S)] * 2, PADDING)),
    ("B 06", "EncoderBlock", (WIDTH, HEADS, 20), lambda: (states(), SEEN)),
    ("B 06", "Encoder", (2, WIDTH, HEADS, 20), lambda: (states(), SEEN)),
    ("B 07", "DecoderBlock", (WIDTH, HEADS, 20), lambda: (states(), states(S), SEEN, PADDING)),
    ("B 08", "Transformer", (23, 19, WIDTH, HEADS, 2, 20, 16), lambda: (ids(23, S), ids(19), PADDING, SEEN)),
    ("C 13.1", "LayerNorm", (WIDTH,), lambda: (5 + 3 * states(),)),
    ("C 13.3", "MLP", (WIDTH,), lambda: (states(),)),
    ("C 13.4", "TransformerBlock", (WIDTH, HEADS), lambda: (states(), SEEN[None])),
    ("E 8.3.3", "MultiHeadAttention", (WIDTH, HEADS), lambda: (states(), SEEN)),
    ("E 8.5.5", "TransformerBlock", (WIDTH, HEADS, 20), lambda: (states(), SEEN)),
]
each_class = pytest.mark.parametrize(
    ("listing", "name", "sizes", "inputs"), [pytest.param(*case, id=" ".join(case[:2])) for case in CLASSES]
)
# NumPy warns of the protocol with which torch reads arrays, in the square root of C 13.1.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")


def printed_names(document):
    """Return the names of a module of ours, with those that its document defines replaced by the document's."""
    names = {**vars(MODULES[document])}
    for listing in LISTINGS:
        if listing.startswith(document):
            names = run_listing(listing, names, calls=False)
    return names


def random_weights(module):
    torch.manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3)
    return module.eval()


def give_weights(printed, ours):
    """Give the weights of our module to that of a listing; the course's classes are no modules."""
    if isinstance(printed, nn.Module):
        printed.eval().load_state_dict(ours.state_dict())
        return
    for name, part in vars(printed).items():
        if isinstance(part, nn.Module | torch.Tensor):
            setattr(printed, name, getattr(ours, name))
        elif hasattr(part, "__dict__"):
            give_weights(part, getattr(ours, name))


@each_class
@pytest.mark.parametrize("parts", ["its own", "ours"])
def test_a_class_as_printed_computes_what_ours_computes(listing, name, sizes, inputs, parts):
    names = printed_names(listing[0]) if parts == "its own" else vars(MODULES[listing[0]])
    printed = run_listing(listing, names, calls=False)[name](*sizes)
    ours = random_weights(getattr(MODULES[listing[0]], name)(*sizes))
    give_weights(printed, ours)
    arguments = inputs()
    torch.testing.assert_close(ours.forward(*arguments), printed.forward(*arguments), atol=2e-5, rtol=1e-5)


@each_class
def test_the_methods_as_printed_work_in_our_class(listing, name, sizes, inputs, monkeypatch):
    our_class = getattr(MODULES[listing[0]], name)
    ours, arguments = random_weights(our_class(*sizes)), inputs()
    expected = ours(*arguments)
    printed = vars(run_listing(listing, vars(MODULES[listing[0]]), calls=False)[name])
    methods = {key: method for key, method in printed.items() if inspect.isfunction(method) and key != "__init__"}
    assert "forward" in methods
    for key, method in methods.items():
        assert hasattr(our_class, key)
        monkeypatch.setattr(our_class, key, method)
    torch.testing.assert_close(ours(*arguments), expected, atol=2e-5, rtol=1e-5)


@each_class
def test_our_class_has_the_attributes_that_the_constructor_as_printed_sets(listing, name, sizes, inputs):
    ours = getattr(MODULES[listing[0]], name)(*sizes)
    printed = run_listing(listing, vars(MODULES[listing[0]]), calls=False)[name](*sizes)
    for key, value in vars(printed).items():
        if not key.startswith("_") and isinstance(value, int | float):
            assert getattr(ours, key) == value
        elif not isinstance(printed, nn.Module):
            assert hasattr(ours, key)
    if isinstance(printed, nn.Module):
        assert dict(ours.named_modules()).keys() == dict(printed.named_modules()).keys()
        shapes = [{key: tensor.shape for key, tensor in model.state_dict().items()} for model in (ours, printed)]
        assert shapes[0] == shapes[1]


def test_the_forward_pass_of_13_2_works_in_our_block(monkeypatch):
    block, x = random_weights(module13.TransformerBlock(WIDTH, HEADS)), states()
    expected = block.forward(x, SEEN[None])
    monkeypatch.setattr(module13.TransformerBlock, "forward", run_listing("C 13.2", {})["forward"])
    torch.testing.assert_close(block.forward(x, SEEN[None]), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("listing", "name", "inputs"),
    [
        ("A attention", "multi_head_attention", lambda: (states(), *torch.randn(4, WIDTH, WIDTH), HEADS)),
        ("B 04", "scaled_dot_product_attention", lambda: (*torch.randn(3, ROWS, HEADS, T, 4), SEEN)),
        ("C mask", "create_causal_mask", lambda: (T,)),
        ("E 8.2.5", "scaled_dot_product_attention", lambda: (*torch.randn(3, ROWS, T, 4), SEEN)),
        ("E 8.4.2", "sinusoidal_positional_encoding", lambda: (16, WIDTH)),
    ],
)
def test_a_function_as_printed_computes_what_ours_computes(listing, name, inputs):
    arguments, printed = inputs(), run_listing(listing, {}, calls=False)[name]
    ours = getattr(MODULES[listing[0]], name)(*arguments)
    torch.testing.assert_close(ours, printed(*arguments), atol=2e-5, rtol=1e-5)


def shape(*sizes):
    return f"torch.Size({[*sizes]})\n"


@pytest.mark.parametrize(
    ("listing", "output"),
    [
        ("B 04", f"Output shape:  {shape(1, 1, 4, 8)}Weights shape: {shape(1, 1, 4, 4)}Weights sum:   1.0000\n"),
        ("B 05", f"Input:  {shape(2, 10, 512)}Output: {shape(2, 10, 512)}"),
        ("B 06", f"Encoder output: {shape(2, 10, 512)}"),
        ("B 08", "Total parameters: 100,970,632\n"),  # the tutorial prints 65,052,672 (docs/errata.md)
        ("E 8.2.5", f"Output shape: {shape(1, 4, 8)}Attention weights:\n"),
        ("E 8.3.3", f"Output shape: {shape(1, 6, 16)}Head attention shapes: {shape(1, 4, 6, 6)}"),
        ("E 8.4.2", f"PE shape: {shape(128, 64)}Position 0 norm: 5.6569\nPosition 127 norm: 5.6569\n"),
        ("E 8.5.5", f"Input shape:  {shape(1, 5, 32)}Output shape: {shape(1, 5, 32)}"),
    ],
)
def test_the_calls_of_a_listing_print_what_it_says(listing, output, capsys):
    with torch.device("meta" if listing == "B 08" else "cpu"):
        run_listing(listing, vars(MODULES[listing[0]]), definitions=False)
    assert capsys.readouterr().out.startswith(output)


def test_the_mask_of_the_lecture_blocks_the_future_in_the_attention_of_its_block():
    block, x = lecture.TransformerBlock(WIDTH, HEADS, 20), torch.randn(ROWS, 128, WIDTH)
    changed = x.clone()
    changed[:, 100] += 1
    before, after = (run_listing("A masking", {"self": block, "x": h})["out"] for h in (x, changed))
    assert torch.equal(before[:, :100], after[:, :100])
    assert not torch.equal(before[:, 100], after[:, 100])


@pytest.mark.parametrize("definitions", [True, False], ids=["its scheduler", "our scheduler"])
def test_the_training_of_the_tutorial_trains_our_transformer(definitions):
    """Its `train_step` reads one row: in more rows `tgt[:, 1:]` is not contiguous, so `.view(-1)` fails."""
    torch.manual_seed(0)
    small = functools.partial(blocks.Transformer, d_model=8, num_heads=2, num_blocks=1, d_ff=16, dropout=0.0)
    names = {**vars(blocks), "Transformer": small}
    names |= run_listing("B 10", names, calls=False)
    if not definitions:
        names["WarmupScheduler"] = blocks.WarmupScheduler
    variables = run_listing("B 10", names, definitions=False)
    step, source, target = variables["train_step"], torch.randint(1, 37_000, (1, S)), torch.randint(1, 37_000, (1, T))
    step.__globals__.update(variables)  # its model, optimizer, scheduler and criterion
    losses = [step(source, target) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert variables["optimizer"].param_groups[0]["lr"] == pytest.approx(512**-0.5 * 4 * 4000**-1.5)  # of step 4
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        step(source.expand(2, -1), target.repeat(2, 1))


@pytest.mark.parametrize("scale", [pytest.param(1, marks=pytest.mark.slow), 48], ids=["as printed", "small"])
@pytest.mark.parametrize("listing", ["C pattern", "C comparison"])
def test_the_language_model_of_the_course_computes_logits_and_generates(listing, scale):
    def gpt(vocab_size, embed_dim, num_layers, num_heads):
        return module13.GPT(
            vocab_size // scale, embed_dim // scale, num_layers, num_heads // min(scale, num_heads // 2)
        )

    tokens = ids(1_000)
    names = {**vars(module13), "GPT": gpt, "tokens": tokens, "prompt": tokens, "x": torch.randn(ROWS, T, 512)}
    variables = run_listing(listing, names, definitions=False)
    assert variables["logits"].shape == (ROWS, T, 50_000 // scale)
    assert variables["generated"].shape == (ROWS, T + 50)
    assert listing == "C pattern" or variables["output"].shape == (ROWS, T, 512)
