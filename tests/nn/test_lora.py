"""Low-rank adapters: the formula, which weights are trained, merging and exact unmerging."""

import pytest
import torch
from operator_support import use_kernels_for_toys
from torch import nn
from torch.testing import assert_close
from training_support import (
    assert_same_run,
    assert_same_weights,
    clone_weights,
    train_to_end,
    train_until,
    write_recipe,
)

import monoblock as mb
from monoblock.errors import ConfigError, InputError
from monoblock.nn.lora import LoraLinear, add_lora, fold_lora, lora_layers, merge_lora, projection_names, unmerge_lora
from monoblock.quantization.convert import dequantize, quantize
from monoblock.runs.recipe import read_recipe
from monoblock.runs.train import prepare_run
from monoblock.training.optimizer import build_optimizers, count_layers_above

VOCAB = 31


def small_model(kind="llama", **knobs):
    torch.manual_seed(3)
    sizes = {"vocab": VOCAB, "width": 24, "depth": 3, "heads": 4, "hidden": 37, "context": 29, **knobs}
    return mb.Transformer(getattr(mb, kind)(**sizes)).eval()


def random_ids(batch=3, length=13):
    torch.manual_seed(5)
    return torch.randint(1, VOCAB, (batch, length))


def randomize_adapters(model):
    """Give adapters random weights, so that they change the output."""
    torch.manual_seed(7)
    for _, layer in lora_layers(model):
        nn.init.normal_(layer.b, std=0.3)
    return model


# -- the formula -------------------------------------------------------------------------------------------------------


def test_an_adapted_projection_is_w_x_plus_alpha_over_r_b_a_x():
    torch.manual_seed(1)
    base = nn.Linear(11, 7).double()
    layer = LoraLinear(base, 3, 5.0)
    x = torch.randn(2, 4, 11, dtype=torch.float64)
    assert torch.equal(layer(x), base(x))  # B is zero
    nn.init.normal_(layer.b)
    expected = torch.einsum("oi,bti->bto", base.weight, x) + base.bias
    expected = expected + 5 / 3 * torch.einsum("or,ri,bti->bto", layer.b, layer.a, x)
    assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_dropout_is_before_a_and_in_training_only():
    layer = LoraLinear(nn.Linear(11, 7), 3, 5.0, dropout=0.5).train()
    nn.init.normal_(layer.b)
    x = torch.randn(5, 11)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize("length", [13, 600], ids=["three products", "joined where they are plain"])
def test_new_adapters_change_nothing(length):
    model = small_model(context=600)
    before = model(x := random_ids(1, length))
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
    model = small_model()
    chosen = add_lora(model, rank=2, targets=targets)
    assert len(chosen) == count
    assert chosen == [name for name, _ in lora_layers(model)]
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {f"{name}.{letter}" for name in chosen for letter in "ab"}


def test_cross_attention_and_both_stacks_are_reached():
    model = small_model("t5")
    assert {name.split(".")[0] for name in projection_names(model)} == {"encoder", "decoder"}
    assert add_lora(model, targets=["cross.key"]) == [f"decoder.{n}.cross.key" for n in range(3)]


@pytest.mark.parametrize(
    ("targets", "message"),
    [(["qeury"], "did you mean 'query'"), (["c_attn"], "'c_attn' matches no projection"), (["head"], "no projection")],
)
def test_a_target_that_does_not_exist_is_refused_and_nothing_is_touched(targets, message):
    model = small_model()
    with pytest.raises(ConfigError, match=message):
        add_lora(model, targets=targets)
    assert all(weight.requires_grad for weight in model.parameters())


def test_adapters_are_not_put_on_top_of_each_other():
    model = small_model()
    with pytest.raises(InputError, match="has no adapters"):
        merge_lora(model)
    add_lora(model)
    with pytest.raises(InputError, match="has adapters already"):
        add_lora(model)
    with pytest.raises(ConfigError, match="is not a whole number above 0; write 1 or more"):
        add_lora(small_model(), rank=0)


# -- merging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt", "bert", "t5"])
def test_merged_is_close_and_unmerged_is_bit_equal(kind):
    model = small_model(kind) if kind != "bert" else small_model(kind, head="masked_lm")
    inputs = (random_ids(), random_ids(3, 7)) if kind == "t5" else (random_ids(),)
    original = clone_weights(model)
    add_lora(model, rank=5, alpha=7, targets=("all",))
    randomize_adapters(model)
    unmerged = model(*inputs)
    merge_lora(model)
    merge_lora(model)  # once is enough
    assert_close(model(*inputs), unmerged, rtol=0, atol=1e-5)
    unmerge_lora(model)
    assert torch.equal(model(*inputs), unmerged)
    base = {
        name.replace(".base.", "."): tensor
        for name, tensor in clone_weights(model).items()
        if name[-2:] not in (".a", ".b")
    }
    assert_same_weights(base, original)
    plain = fold_lora(model)
    assert not list(lora_layers(plain))
    assert plain.state_dict().keys() == original.keys()
    assert_close(plain(*inputs), unmerged, rtol=0, atol=1e-5)
    assert all(weight.requires_grad for weight in plain.parameters())


def test_adapters_alone_memorize_a_text():
    model = small_model()
    nn.init.normal_(model.get_parameter("head.output.weight"))  # or logits could never be far apart
    add_lora(model, rank=4, alpha=8, targets=("all",))
    optimizer = torch.optim.AdamW((w for w in model.parameters() if w.requires_grad), lr=2e-2)
    x, losses = random_ids(2, 17), []
    for _ in range(150):
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
    model = small_model(tie="none")
    quantized = quantize(model, bits=bits, group=32)
    dequantized = dequantize(quantized)
    assert dequantized.config == model.config
    assert_close(dequantized(random_ids()), quantized(random_ids()), rtol=0, atol=1e-5)
    add_lora(quantized, rank=5)
    randomize_adapters(quantized)
    quantized(random_ids()).sum().backward()
    assert all(layer.a.grad is not None and layer.b.grad is not None for _, layer in lora_layers(quantized))
    plain = dequantize(fold_lora(quantized))
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert_close(plain(random_ids()), quantized(random_ids()), rtol=0, atol=2e-5)
    with pytest.raises(InputError, match="cannot be merged into a quantized weight"):
        merge_lora(quantized)


# -- decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["value", "up", "all"])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_decoding_with_adapters_equals_decoding_with_folded_ones(bits, target, monkeypatch):
    """Also where the CPU operators would run, which support plain matrices only."""
    use_kernels_for_toys(monkeypatch)
    model = small_model() if bits is None else quantize(small_model(), bits=bits, group=32)
    before = model(x := random_ids(3, 5))
    add_lora(model, rank=5, alpha=20, targets=(target,))
    randomize_adapters(model)
    plain, limit = (fold_lora(model), 1e-5) if bits is None else (dequantize(fold_lora(model)), 5e-4)
    plain.double()
    assert (plain(x) - before).abs().max() > 10 * limit  # the adapters matter
    generated = model.generate(x, max_new_tokens=11)
    logits = plain(generated[:, :-1])[:, 4:]
    assert (logits.amax(-1) - logits.gather(-1, generated[:, 5:, None])[..., 0]).max() < limit  # the best, or as good


# -- rates by layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_layers_rate_is_the_one_aboves_times_the_decay(kind):
    model = small_model()
    names = {weight: name for name, weight in model.named_parameters()}
    optimizers = build_optimizers(model, kind, layer_decay=0.5, adam_factor=1.0)
    optimizers.set_lr(8.0)
    rate = {
        names[weight]: group["lr"]
        for one in optimizers.optimizers
        for group in one.param_groups
        for weight in group["params"]
    }
    assert rate.keys() == set(names.values())
    assert rate["decoder.norm.weight"] == 8.0
    assert [rate[f"decoder.{n}.attention.query.weight"] for n in range(3)] == [1.0, 2.0, 4.0]
    assert [rate[f"decoder.{n}.attention_norm.weight"] for n in range(3)] == [1.0, 2.0, 4.0]
    assert rate["input.token.weight"] == 0.5
    assert count_layers_above(["encoder.0.x", "encoder.1.x", "head.output.weight", "input.token.weight"]) == {
        "encoder.0.x": 2,
        "encoder.1.x": 1,
        "head.output.weight": 0,
        "input.token.weight": 3,
    }


# -- runs --------------------------------------------------------------------------------------------------------------

WARM = {"model": {"family": "llama", "width": 24, "depth": 3, "heads": 4, "hidden": 37, "context": 13}}
LORA = {"lora": {"rank": 3, "alpha": 6, "targets": ["all"], "dropout": 0.1}, "train": {"lr": 1e-2, "ema": 0.5}}


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    """A small LLaMA trained on words, to begin with."""
    folder = tmp_path_factory.mktemp("lora")
    train_to_end(write_recipe(folder, WARM), folder / "base")
    return folder


def recipe(base_folder, path, *changes):
    text = write_recipe(base_folder, *changes).read_text()  # on the same corpus
    head, _, rest = text.partition("[model]\n")
    _, _, after = rest.partition("\n[")
    path.write_text(f'{head}[model]\nfolder = "{base_folder / "base"}"\n\n[{after}')
    return path


def test_a_lora_run_leaves_its_base_alone_and_a_model_beside_the_adapter(base_folder, tmp_path):
    before = (base_folder / "base" / "model.safetensors").read_bytes()
    run = prepare_run(
        read_recipe(str(recipe(base_folder, tmp_path / "lora.toml", LORA, {"train": {"ema": 0.0}}))), tmp_path / "out"
    )
    base = mb.Transformer.from_pretrained(base_folder / "base").eval()
    list(run.events())
    torch.use_deterministic_algorithms(False)
    assert (base_folder / "base" / "model.safetensors").read_bytes() == before
    trained = run.trainer.model
    frozen = {
        name.replace(".base.", "."): w for name, w in clone_weights(trained).items() if name[-2:] not in (".a", ".b")
    }
    assert_same_weights(frozen, clone_weights(base))
    final = mb.Transformer.from_pretrained(tmp_path / "out").eval()
    x = torch.randint(1, 20, (2, 11))
    assert_close(final(x), trained.eval()(x), rtol=0, atol=1e-5)
    assert not torch.equal(final(x), base(x))
    mb.load_adapter(base, tmp_path / "out" / "adapter")
    assert_close(base(x), final(x), rtol=0, atol=1e-5)
    assert mb.load(tmp_path / "out").generate("the king", max_new_tokens=3)


def test_checkpoints_hold_the_adapter_alone_and_resume_bit_for_bit(base_folder, tmp_path):
    from safetensors.torch import load_file

    path = recipe(base_folder, tmp_path / "lora.toml", LORA)
    train_to_end(path, tmp_path / "whole")
    train_until(path, tmp_path / "broken", 7)
    train_until(path, tmp_path / "broken", 14, resume=True, save=True)
    train_to_end(path, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "broken", tmp_path / "whole", 23)
    stored = load_file(tmp_path / "whole" / "checkpoints" / "step-20" / "model.safetensors")
    assert {name.rsplit(".", 1)[-1] for name in stored} == {"a", "b"}


def test_small_weights_and_frozen_layers_are_recipe_keys(base_folder, tmp_path):
    path = recipe(base_folder, tmp_path / "lora.toml", LORA, {"lora": {"bits": 8}, "train": {"steps": 3}})
    run, events = train_to_end(path, tmp_path / "small")
    (event,) = [e for e in events if "8-bit weights" in getattr(e, "reason", "")]
    plain = sum(weight.numel() for weight in mb.Transformer.from_pretrained(base_folder / "base").parameters())
    again = prepare_run(read_recipe(str(path)), tmp_path / "again").model
    trained = sum(weight.numel() for weight in again.parameters() if weight.requires_grad)
    assert f"{trained:,} of {plain + trained:,} weights are trained" in event.decision
    assert (
        mb.Transformer.from_pretrained(tmp_path / "small").config
        == mb.Transformer.from_pretrained(base_folder / "base").config
    )
    path = recipe(
        base_folder, tmp_path / "frozen.toml", {"train": {"freeze_layers": 2, "layer_decay": 0.9, "steps": 3}}
    )
    run, _ = train_to_end(path, tmp_path / "frozen")
    base, trained_weights = (
        clone_weights(mb.Transformer.from_pretrained(base_folder / "base")),
        clone_weights(run.model),
    )
    same = {name for name in trained_weights if torch.equal(trained_weights[name], base[name])}
    assert same == {name for name in trained_weights if name.startswith(("input.", "decoder.0.", "decoder.1."))}
    with pytest.raises(ConfigError, match=r"lora\.bits=8 quantizes the frozen weights"):
        read_recipe(str(path), ["lora.bits=8"])
    with pytest.raises(ConfigError, match=r"train\.freeze_layers=9 is more than the \d layers of this model"):
        prepare_run(read_recipe(str(path), ["train.freeze_layers=9"]), tmp_path / "many")
    with pytest.raises(ConfigError, match=r"train\.layer_decay=0\.0 is not in"):
        read_recipe(str(path), ["train.layer_decay=0.0"])
    path = recipe(base_folder, tmp_path / "lora.toml", LORA, {"train": {"freeze_layers": 1}})
    assert prepare_run(read_recipe(str(path)), tmp_path / "both").trainable_event.reason.endswith(
        "the first 1 layers frozen with their adapters"
    )
