"""Parameter counts in closed form equal published ones, those of the built models, and those of torch layers."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support import has_experts, preset_names

from monoblock.accounting.report import account
from monoblock.baselines.lstm import Recurrent
from monoblock.config.families import bart, bert, gpt, vaswani, vit
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    Buckets,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    FramesConfig,
    HeadConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    RecurrentConfig,
    Repeat,
    Sinusoid,
    StackConfig,
)
from monoblock.config.presets import PRESETS, tiny
from monoblock.errors import ConfigError
from monoblock.model import Transformer

RMS = NormConfig(kind="rms", affine="scale")
BARE = NormConfig(affine="none")
PUBLISHED = {
    "gpt2": 124_439_808,
    "bert-base": 109_482_240,
    "t5-small": 60_506_624,
    "llama-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "vit-b16": 86_567_656,
}


def count_built(config):
    """The number of parameters of the model, built on the meta device."""
    with torch.device("meta"):
        module = Recurrent(config) if isinstance(config, RecurrentConfig) else Transformer(config)
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_published_model_has_its_published_count(name, count):
    assert account(name).parameters == count


@pytest.mark.parametrize("name", PRESETS)
def test_the_stated_count_of_a_preset_is_that_of_its_model(name):
    costs = account(name)
    assert costs.parameters == PRESETS[name].parameters == count_built(PRESETS[name].config)


@pytest.mark.parametrize("name", PRESETS)
def test_a_tiny_preset_has_the_count_of_its_model(name):
    assert account(tiny(name)).parameters == count_built(tiny(name))


# -- choices that no preset has --------------------------------------------------------------------------------------


def small_encoder(block=None, *, depth=2, tied=False, source=None, head=None, **others):
    """A small encoder around one block."""
    block = block or BlockConfig(
        width=30, attention=AttentionConfig(heads=3, mask="full"), feedforward=FeedForwardConfig(hidden=17)
    )
    stack = StackConfig(pattern=(Repeat(blocks=(block,), times=depth, tied=tied),))
    return ModelConfig(input=source or EmbeddingConfig(vocab=53), encoder=stack, head=head, **others)


def frames(source):
    """An encoder-decoder from audio to text."""
    config = vaswani(vocab=53, target_vocab=59, width=30, depth=2, heads=3, hidden=17)
    return replace(config, input=source)


FACTORISED = EmbeddingConfig(vocab=53, context=29, dim=7, positions=Learned(offset=2), segments=2, norm=NormConfig())
MASKED = HeadConfig(kind="masked_lm", transform="gelu", norm=NormConfig(), bias="learned")
UNUSUAL = {
    "weights used again in every layer": small_encoder(depth=5, tied=True),
    "a factorised embedding": small_encoder(source=FACTORISED),
    "a factorised embedding, projected first": small_encoder(source=replace(FACTORISED, projection="first")),
    "a factorised embedding without projection bias": small_encoder(source=replace(FACTORISED, projection_bias=False)),
    "ALBERT": small_encoder(depth=3, tied=True, source=FACTORISED, head=MASKED, tie="output"),
    "a transform to an untied output": small_encoder(source=FACTORISED, head=MASKED),
    "a head without biases": small_encoder(head=replace(MASKED, bias="none", transform_bias=False)),
    "spans": small_encoder(head=HeadConfig(kind="spans", bias="learned")),
    "tags": small_encoder(head=HeadConfig(kind="tagger", classes=11)),
    "a number": small_encoder(head=HeadConfig(kind="regression", bias="learned")),
    "several numbers": small_encoder(head=HeadConfig(kind="regression", classes=7, pooler="gelu", transform="gelu")),
    "a pooled vector": small_encoder(head=HeadConfig(kind="pooled", pooler="tanh")),
    "registers": replace(
        vit(image=12, patch=4, width=30, depth=2, heads=3, classes=7),
        input=PatchConfig(image=12, patch=4, registers=3, class_token=False, bias=False, norm=NormConfig()),
    ),
    "a distillation token and a mask token": replace(
        vit(image=12, patch=4, width=30, depth=2, heads=3, classes=7),
        input=PatchConfig(image=12, patch=4, distillation_token=True, mask_token=True),
        head=HeadConfig(kind="classifier", classes=7, bias="learned", teacher=True),
    ),
    "a projected vector": small_encoder(head=HeadConfig(kind="pooled", pooling="last", project=13)),
    "a pooler of another kind": small_encoder(head=HeadConfig(kind="classifier", classes=7, pooler="gelu")),
    "frames": frames(FramesConfig(channels=11, context=17)),
    "frames with sinusoids": frames(FramesConfig(channels=11, context=17, positions=Sinusoid(), norm=NormConfig())),
    "three tables": replace(
        vaswani(vocab=53, target_vocab=59, width=30, depth=2, heads=3, hidden=17),
        tie="none",
        head=HeadConfig(kind="language_model", bias="learned"),
    ),
    "an output that is a target table": vaswani(vocab=53, target_vocab=59, width=30, depth=2, heads=3, hidden=17),
    "a tied output on a factorised embedding": replace(
        gpt(vocab=53, width=30, depth=2, heads=3, context=29), input=replace(FACTORISED, segments=0)
    ),
}


@pytest.mark.parametrize("config", UNUSUAL.values(), ids=list(UNUSUAL))
def test_an_unusual_model_has_the_count_of_its_closed_form(config):
    assert account(config).parameters == count_built(config)


def test_norms_inside_and_after_blocks_are_counted_separately():
    """`decoder.norm` is the norm after the last block, as in the names of weights."""
    config = gpt(vocab=53, width=30, depth=7, heads=3, context=29)
    counts, weights = account(config).components, Transformer(config).state_dict()
    assert counts["decoder.norm"] == sum(w.numel() for name, w in weights.items() if name.startswith("decoder.norm."))
    assert counts["decoder.block_norms"] == 7 * 2 * 2 * 30


def test_a_stack_of_a_hundred_thousand_blocks_is_counted_quickly():
    deep = account(gpt(vocab=53, width=30, depth=100_000, heads=3, context=29))
    assert deep.components["decoder.block_norms"] == 100_000 * 2 * 2 * 30
    assert deep.training_bytes(1, 17).activations > 0
    assert deep.flops(1, 17).forward > 0


norms = st.sampled_from([NormConfig(), RMS, BARE, NormConfig(affine="scale")])
attentions = st.builds(
    AttentionConfig,
    heads=st.just(6),
    kv_heads=st.sampled_from([None, 1, 2, 3]),
    head_dim=st.sampled_from([None, 4, 10]),
    value_dim=st.sampled_from([None, 7]),
    bias=st.sampled_from(["", "qkv", "qkvo", "o"]),
    mask=st.just("full"),
    positions=st.sampled_from([None, Buckets(), Buckets(shared=False, count=16)]),
    qk_norm=st.one_of(st.none(), norms),
    qk_norm_over=st.sampled_from(["head", "each_head", "width"]),
    sinks=st.booleans(),
)
feedforwards = st.builds(
    FeedForwardConfig,
    hidden=st.just(17),
    gated=st.booleans(),
    bias=st.booleans(),
    experts=st.sampled_from([None, ExpertsConfig(count=5, top_k=3), ExpertsConfig(count=2, router_bias=True)]),
)
blocks = st.builds(
    BlockConfig,
    width=st.just(30),
    attention=attentions,
    feedforward=feedforwards,
    norm=norms,
    norm_place=st.sampled_from(["pre", "post", "output", "sandwich"]),
    layer_scale=st.sampled_from([None, 0.1]),
)


@settings(max_examples=60, deadline=None)
@given(block=blocks, tied=st.booleans(), residual=st.sampled_from(["sequential", "parallel", "parallel_shared"]))
def test_any_block_has_the_count_of_its_closed_form(block, tied, residual):
    norm_place = block.norm_place if residual == "sequential" else "pre"
    config = small_encoder(replace(block, residual=residual, norm_place=norm_place), depth=3, tied=tied)
    assert account(config).parameters == count_built(config)


# -- shared and untrained weights ------------------------------------------------------------------------------------


def test_tying_saves_one_table_and_a_bias_is_still_counted():
    tied = gpt(vocab=53, width=30, depth=2, heads=3, context=29)
    assert account(replace(tied, tie="none")).parameters - account(tied).parameters == 53 * 30
    biased = replace(tied, head=HeadConfig(kind="language_model", bias="learned"))
    assert account(biased).parameters - account(tied).parameters == 53


def test_a_fixed_bias_is_not_a_parameter():
    config = bart(vocab=53, width=30, depth=2, heads=3, context=29)
    assert config.head.bias == "fixed"
    none = replace(config, head=replace(config.head, bias="none"))
    assert account(config).parameters == account(none).parameters


def test_mixtral_uses_13_of_its_47_billion_parameters_for_a_token():
    """Jiang et al. 2024: 47 B parameters, 13 B of them used for a token."""
    costs = account("mixtral-8x7b")
    assert (round(costs.parameters / 1e9), round(costs.active_parameters / 1e9)) == (47, 13)


@pytest.mark.parametrize("name", preset_names(lambda config: not has_experts(config)))
def test_without_experts_every_parameter_is_active(name):
    assert account(name).active_parameters == account(name).parameters


@pytest.mark.parametrize("name", PRESETS)
def test_components_are_named_after_the_weights_they_count(name):
    config = tiny(name)
    with torch.device("meta"):
        weights = [path for path, _ in Transformer(config).named_parameters()]
    for component in account(config).components:
        prefix = component.split(".")[0]
        assert prefix in ("input", "target", "encoder", "decoder", "head")
        assert any(path.startswith(prefix) for path in weights)


# -- torch layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "heads", "depth", "hidden"), [(512, 8, 6, 2048), (30, 2, 3, 17)])
def test_the_model_of_the_paper_has_the_weights_of_torch_nn_transformer(width, heads, depth, hidden):
    """torch.nn.Transformer ends each stack with a norm, which the paper does not have."""
    with torch.device("meta"):
        theirs = torch.nn.Transformer(width, heads, depth, depth, hidden, batch_first=True)
    count = sum(parameter.numel() for parameter in theirs.parameters()) - 2 * 2 * width
    ours = account(vaswani(vocab=53, width=width, heads=heads, depth=depth, hidden=hidden))
    assert ours.parameters == count + 53 * width


@pytest.mark.parametrize("kind", ["language_model", "encoder_decoder"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("target", [None, 59])
def test_a_recurrent_baseline_has_the_count_of_its_closed_form(kind, tie, depth, target):
    if kind == "language_model":
        target = None
    config = RecurrentConfig(kind=kind, vocab=53, width=14, depth=depth, tie=tie, target_vocab=target)
    costs = account(config)
    assert costs.family == "recurrent"
    assert costs.parameters == costs.active_parameters == count_built(config)


# -- the command line ------------------------------------------------------------------------------------------------


def test_an_unknown_preset_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match="gpt2"):
        account("gtp2")


def test_accounting_does_not_import_torch():
    code = """
import sys
from monoblock.cli.main import run
assert run(["account", "llama2-70b", "--tokens", "1000", "--new", "10"]) == 0
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "68,976,648,192" in done.stdout


@pytest.fixture
def run_account(capsys):
    from monoblock.cli.main import run

    def call(*words):
        code = run(["account", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_json_contains_all_costs(run_account):
    code, out, _ = run_account("gpt2", "--json")
    costs = json.loads(out)
    assert code == 0
    assert {
        "name",
        "family",
        "parameters",
        "active_parameters",
        "components",
        "flops",
        "memory",
        "kv_cache_bytes",
    } <= set(costs)
    assert costs["parameters"] == sum(costs["components"].values()) == 124_439_808
    assert costs["flops"]["forward"] == sum(costs["flops"]["components"].values())


def test_the_table_shows_a_bar_for_each_component_and_suggests_a_command(run_account):
    code, out, err = run_account("bert-base", "--batch", "2", "--length", "128")
    assert code == 0
    assert "encoder.feedforward" in out
    assert "█" in out
    assert "Try: monoblock" in err


def test_a_folder_and_a_file_are_accounted_for_like_the_configuration_in_them(run_account, tmp_path):
    config = bert(vocab=53, width=30, depth=2, heads=3, context=29)
    (tmp_path / "config.json").write_text(config.to_json())
    bare = json.loads(run_account(str(tmp_path), "--json")[1])
    wrapped = tmp_path / "wrapped.json"
    wrapped.write_text(json.dumps({"format": "monoblock", "model": config.to_dict()}))
    for costs in (bare, json.loads(run_account(str(wrapped), "--json")[1])):
        assert costs["parameters"] == account(config).parameters


def test_a_recurrent_configuration_is_read_too(run_account, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"kind": "encoder_decoder", "vocab": 53, "width": 14}))
    code, out, _ = run_account(str(file))
    assert code == 0
    assert "encoder.lstm" in out


def test_choices_can_be_changed_on_the_command_line(run_account):
    _, out, _ = run_account("gpt2", "depth=24", "width=1024", "heads=16", "--json")
    assert json.loads(out)["parameters"] == 354_823_168  # GPT-2 medium


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gtp2"], "did you mean 'gpt2'"),
        (["gpt2", "depht=3"], "did you mean 'depth'"),
        (["gpt2", "depth"], "name=value"),
        (["gpt2", "--length", "2048"], "1024 or less"),
        (["vit-b16", "--length", "30"], "length=30 is wrong, because an image has 197 tokens"),
        (["gpt2", "--target-length", "5"], "encoder-decoder"),
        (["gpt2", "--batch", "0"], "batch"),
        (["gpt2", "--tokens", "5", "--mfu", "40"], "mfu"),
        (["bert-base", "--new", "5"], "decoder"),
        (["."], "config.json"),
    ],
)
def test_a_mistake_is_a_one_line_error(run_account, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_account(*words)
    assert code in (1, 2)
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def test_a_published_configuration_is_accounted_for_or_says_what_is_wrong(run_account, tmp_path):
    sizes = {"vocab_size": 61, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 37}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    code, out, _ = run_account(str(tmp_path), "--json")
    layer = 4 * 36 * 36 + 4 * 36 + 8 * 36 * 36 + 5 * 36 + 4 * 36
    assert (code, json.loads(out)["parameters"]) == (0, (61 + 37) * 36 + 2 * layer + 2 * 36)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 50257}')
    code, _, err = run_account(str(tmp_path))
    assert code == 1
    assert "it lacks the field" in err


def test_a_gguf_file_is_accounted_for(run_account, tmp_path):
    pytest.importorskip("gguf")
    from monoblock.config.families import llama
    from monoblock.interop.gguf.writer import save_gguf

    model = Transformer(llama(vocab=61, width=36, depth=2, heads=3, context=37))
    save_gguf(model, tmp_path / "model.gguf", kind="f32")
    code, out, _ = run_account(str(tmp_path / "model.gguf"), "--json")
    assert (code, json.loads(out)["parameters"]) == (0, sum(weight.numel() for weight in model.parameters()))
