"""Low-rank adapters: the formula, what is trained and what is not, merging that can be taken back bit for bit."""

from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from training_support import assert_same_run, assert_same_weights, train, train_until, weights, write_recipe

import monoblock as mb
from monoblock.decoding import prepare as preparing
from monoblock.errors import ConfigError, InputError
from monoblock.lora import Adapted, adapted, add_lora, folded, merge_lora, projections, unmerge_lora
from monoblock.quantize.convert import quantized, widened
from monoblock.tasks.recipe import read
from monoblock.tasks.run import prepare
from monoblock.training.optimizer import build, layers_above

VOCAB = 31


def small(kind="llama", **knobs):
    torch.manual_seed(3)
    sizes = {"vocab": VOCAB, "width": 24, "depth": 3, "heads": 4, "hidden": 37, "context": 29, **knobs}
    return mb.Transformer(getattr(mb, kind)(**sizes)).eval()


def ids(batch=3, length=13):
    torch.manual_seed(5)
    return torch.randint(1, VOCAB, (batch, length))


def drawn(model):
    """Adapters that say something."""
    torch.manual_seed(7)
    for _, part in adapted(model):
        nn.init.normal_(part.b, std=0.3)
    return model


# -- the formula -------------------------------------------------------------------------------------------------------


def test_an_adapted_projection_is_w_x_plus_alpha_over_r_b_a_x():
    torch.manual_seed(1)
    base = nn.Linear(11, 7).double()
    part = Adapted(base, 3, 5.0)
    x = torch.randn(2, 4, 11, dtype=torch.float64)
    assert torch.equal(part(x), base(x))  # B is zero
    nn.init.normal_(part.b)
    wanted = torch.einsum("oi,bti->bto", base.weight, x) + base.bias
    wanted = wanted + 5 / 3 * torch.einsum("or,ri,bti->bto", part.b, part.a, x)
    assert_close(part(x), wanted, rtol=0, atol=1e-12)


def test_dropout_is_before_a_and_in_training_only():
    part = Adapted(nn.Linear(11, 7), 3, 5.0, dropout=0.5).train()
    nn.init.normal_(part.b)
    x = torch.randn(5, 11)
    assert not torch.equal(part(x), part(x))
    assert torch.equal(part.eval()(x), part(x))


@pytest.mark.parametrize("length", [13, 600], ids=["three products", "joined where they are plain"])
def test_a_model_with_fresh_adapters_says_what_it_said(length):
    model = small(context=600)
    before = model(x := ids(1, length))
    add_lora(model, rank=5, targets=("all",))
    assert_close(model(x), before, rtol=0, atol=2e-6)


# -- which projections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (("query", "value"), 6),
        (("q", "v"), 6),
        (("all",), 21),
        (("decoder.1.feedforward.up",), 1),
        (("output", "k"), 6),
    ],
)
def test_targets_are_ends_of_names(targets, count):
    model = small()
    chosen = add_lora(model, rank=2, targets=targets)
    assert len(chosen) == count
    assert chosen == [name for name, _ in adapted(model)]
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {f"{name}.{letter}" for name in chosen for letter in "ab"}


def test_cross_attention_and_both_stacks_are_reached():
    model = small("t5")
    assert {name.split(".")[0] for name in projections(model)} == {"encoder", "decoder"}
    assert add_lora(model, targets=["cross.key"]) == [f"decoder.{n}.cross.key" for n in range(3)]


@pytest.mark.parametrize(
    ("targets", "said"),
    [(["qeury"], "did you mean 'query'"), (["c_attn"], "'c_attn' is no projection"), (["head"], "no projection")],
)
def test_a_target_that_does_not_exist_is_refused_and_nothing_is_touched(targets, said):
    model = small()
    with pytest.raises(ConfigError, match=said):
        add_lora(model, targets=targets)
    assert all(weight.requires_grad for weight in model.parameters())


def test_adapters_are_not_put_on_top_of_each_other():
    model = small()
    with pytest.raises(InputError, match="has no adapters"):
        merge_lora(model)
    add_lora(model)
    with pytest.raises(InputError, match="has adapters already"):
        add_lora(model)
    with pytest.raises(ConfigError, match="a rank of 1 or more"):
        add_lora(small(), rank=0)


# -- merging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt", "bert", "t5"])
def test_merged_is_close_and_unmerged_is_bit_equal(kind):
    model = small(kind) if kind != "bert" else small(kind, head="masked_lm")
    given = (ids(), ids(3, 7)) if kind == "t5" else (ids(),)
    original = weights(model)
    add_lora(model, rank=5, alpha=7, targets=("all",))
    drawn(model)
    unmerged = model(*given)
    merge_lora(model)
    merge_lora(model)  # once is enough
    assert_close(model(*given), unmerged, rtol=0, atol=1e-5)
    unmerge_lora(model)
    assert torch.equal(model(*given), unmerged)
    base = {
        name.replace(".base.", "."): tensor for name, tensor in weights(model).items() if name[-2:] not in (".a", ".b")
    }
    assert_same_weights(base, original)
    plain = folded(model)
    assert not list(adapted(plain))
    assert plain.state_dict().keys() == original.keys()
    assert_close(plain(*given), unmerged, rtol=0, atol=1e-5)
    assert all(weight.requires_grad for weight in plain.parameters())


def test_adapters_alone_learn_a_text_by_heart():
    model = small()
    nn.init.normal_(model.get_parameter("head.output.weight"))  # or logits could never be far apart
    add_lora(model, rank=4, alpha=8, targets=("all",))
    optimizer = torch.optim.AdamW((w for w in model.parameters() if w.requires_grad), lr=2e-2)
    x, losses = ids(2, 17), []
    for _ in range(60):
        logits = model(x[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


# -- 8-bit weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_learn_beside_small_weights_and_fold_into_ordinary_ones(bits):
    model = small(tie="none")
    tiny = quantized(model, bits=bits, group=32)
    wide = widened(tiny)
    assert wide.config == model.config
    assert_close(wide(ids()), tiny(ids()), rtol=0, atol=1e-5)
    add_lora(tiny, rank=5)
    drawn(tiny)
    tiny(ids()).sum().backward()
    assert all(part.a.grad is not None and part.b.grad is not None for _, part in adapted(tiny))
    plain = widened(folded(tiny))
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert_close(plain(ids()), tiny(ids()), rtol=0, atol=2e-5)
    with pytest.raises(InputError, match="no room for an adapter"):
        merge_lora(tiny)


# -- decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["value", "up", "all"])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_model_says_with_live_adapters_what_it_says_when_they_are_folded(bits, target, monkeypatch):
    """Also where steps would go by one operator, which reads nothing but plain matrices."""
    monkeypatch.setattr(preparing, "LARGE", 0)
    monkeypatch.setattr(preparing, "TWINS_MADE", WeakKeyDictionary())
    model = small() if bits is None else quantized(small(), bits=bits, group=32)
    before = model(x := ids(3, 5))
    add_lora(model, rank=5, alpha=20, targets=(target,))
    drawn(model)
    plain, limit = (folded(model), 1e-5) if bits is None else (widened(folded(model)), 5e-4)
    plain.double()
    assert (plain(x) - before).abs().max() > 10 * limit  # adapters that say something
    said = model.generate(x, max_new_tokens=11)
    logits = plain(said[:, :-1])[:, 4:]
    assert (logits.amax(-1) - logits.gather(-1, said[:, 5:, None])[..., 0]).max() < limit  # the best, or as good


# -- rates by layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_layers_rate_is_the_one_aboves_times_the_decay(kind):
    model = small()
    names = {weight: name for name, weight in model.named_parameters()}
    optimizers = build(model, kind, layer_decay=0.5, adam_factor=1.0)
    optimizers.set_rate(8.0)
    rate = {
        names[weight]: group["lr"]
        for one in optimizers.each
        for group in one.param_groups
        for weight in group["params"]
    }
    assert rate.keys() == set(names.values())
    assert rate["decoder.norm.weight"] == 8.0
    assert [rate[f"decoder.{n}.attention.query.weight"] for n in range(3)] == [1.0, 2.0, 4.0]
    assert [rate[f"decoder.{n}.attention_norm.weight"] for n in range(3)] == [1.0, 2.0, 4.0]
    assert rate["input.token.weight"] == 0.5
    assert layers_above(["encoder.0.x", "encoder.1.x", "head.output.weight", "input.token.weight"]) == {
        "encoder.0.x": 2,
        "encoder.1.x": 1,
        "head.output.weight": 0,
        "input.token.weight": 3,
    }


# -- runs --------------------------------------------------------------------------------------------------------------

WARM = {"model": {"family": "llama", "width": 24, "depth": 3, "heads": 4, "hidden": 37, "context": 13}}
LORA = {"lora": {"rank": 3, "alpha": 6, "targets": ["all"], "dropout": 0.1}, "train": {"lr": 1e-2, "ema": 0.5}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A small LLaMA trained on words, to begin with."""
    folder = tmp_path_factory.mktemp("lora")
    train(write_recipe(folder, WARM), folder / "base")
    return folder


def recipe(place, path, *changes):
    made = write_recipe(place, *changes).read_text()  # on the same corpus
    head, _, rest = made.partition("[model]\n")
    _, _, after = rest.partition("\n[")
    path.write_text(f'{head}[model]\nfolder = "{place / "base"}"\n\n[{after}')
    return path


def test_a_lora_run_leaves_its_base_alone_and_a_model_beside_the_adapter(place, tmp_path):
    before = (place / "base" / "model.safetensors").read_bytes()
    run = prepare(read(str(recipe(place, tmp_path / "lora.toml", LORA, {"train": {"ema": 0.0}}))), tmp_path / "out")
    base = mb.Transformer.from_pretrained(place / "base").eval()
    list(run.events())
    torch.use_deterministic_algorithms(False)
    assert (place / "base" / "model.safetensors").read_bytes() == before
    trained = run.trainer.model
    frozen = {name.replace(".base.", "."): w for name, w in weights(trained).items() if name[-2:] not in (".a", ".b")}
    assert_same_weights(frozen, weights(base))
    final = mb.Transformer.from_pretrained(tmp_path / "out").eval()
    x = torch.randint(1, 20, (2, 11))
    assert_close(final(x), trained.eval()(x), rtol=0, atol=1e-5)
    assert not torch.equal(final(x), base(x))
    mb.load_adapter(base, tmp_path / "out" / "adapter")
    assert_close(base(x), final(x), rtol=0, atol=1e-5)
    assert mb.load(tmp_path / "out").generate("the king", max_new_tokens=3)


def test_checkpoints_hold_the_adapter_alone_and_resume_bit_for_bit(place, tmp_path):
    from safetensors.torch import load_file

    path = recipe(place, tmp_path / "lora.toml", LORA)
    train(path, tmp_path / "whole")
    train_until(path, tmp_path / "broken", 7)
    train_until(path, tmp_path / "broken", 14, resume=True, saving=True)
    train(path, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "broken", tmp_path / "whole", 23)
    stored = load_file(tmp_path / "whole" / "checkpoints" / "step-20" / "model.safetensors")
    assert {name.rsplit(".", 1)[-1] for name in stored} == {"a", "b"}


def test_small_weights_and_frozen_layers_are_recipe_keys(place, tmp_path):
    path = recipe(place, tmp_path / "lora.toml", LORA, {"lora": {"bits": 8}, "train": {"steps": 3}})
    run, events = train(path, tmp_path / "small")
    (said,) = [event for event in events if "8-bit weights" in getattr(event, "why", "")]
    plain = sum(weight.numel() for weight in mb.Transformer.from_pretrained(place / "base").parameters())
    again = prepare(read(str(path)), tmp_path / "again").model
    trained = sum(weight.numel() for weight in again.parameters() if weight.requires_grad)
    assert f"{trained:,} of {plain + trained:,} weights are trained" in said.what
    assert (
        mb.Transformer.from_pretrained(tmp_path / "small").config
        == mb.Transformer.from_pretrained(place / "base").config
    )
    path = recipe(place, tmp_path / "frozen.toml", {"train": {"freeze": 2, "layer_decay": 0.9, "steps": 3}})
    run, _ = train(path, tmp_path / "frozen")
    base, own = weights(mb.Transformer.from_pretrained(place / "base")), weights(run.model)
    same = {name for name in own if torch.equal(own[name], base[name])}
    assert same == {name for name in own if name.startswith(("input.", "decoder.0.", "decoder.1."))}
    with pytest.raises(ConfigError, match=r"lora\.bits=8 stores the weights beside adapters"):
        read(str(path), ["lora.bits=8"])
    with pytest.raises(ConfigError, match=r"train\.freeze=9 is more than the \d layers of this model"):
        prepare(read(str(path), ["train.freeze=9"]), tmp_path / "many")
    with pytest.raises(ConfigError, match=r"train\.layer_decay=0\.0 is no share"):
        read(str(path), ["train.layer_decay=0.0"])
    path = recipe(place, tmp_path / "lora.toml", LORA, {"train": {"freeze": 1}})
    assert prepare(read(str(path)), tmp_path / "both").tuned.why.endswith(
        "the first 1 layers frozen with their adapters"
    )
