"""Hugging Face folders: what is refused and in which words, what the tensors decide, how much memory a load takes.

That logits are the published classes' own is shown in tests/parity/test_logits.py; here no reference is needed.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import bit_equal, given, toy

from monoblock.config import ModelConfig
from monoblock.errors import ConfigError, FileError
from monoblock.interop.hf import choose, export_hf
from monoblock.interop.hf_config import difference, roll, unroll
from monoblock.interop.rename import (
    CONV,
    CONV_ROWS,
    FLAT1,
    FLAT2,
    GROUPED,
    HALVES,
    ROWS,
    SHARDED,
    STACKED,
    TURNED_EACH,
    WOVEN,
    Heads,
    Rule,
    plan,
)
from monoblock.interop.safely import INDEX, WEIGHTS
from monoblock.knobs import vary
from monoblock.model import Transformer
from monoblock.presets import PRESETS, preset


@pytest.fixture
def folder(tmp_path):
    export_hf(toy("llama-7b"), tmp_path / "model")
    return tmp_path / "model"


def refused(message, folder, **options):
    with pytest.raises(FileError, match=message) as problem:
        Transformer.from_pretrained(folder, **options)
    assert "\n" not in str(problem.value)
    assert str(problem.value).startswith(str(folder))


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def drop_field(folder, name):
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != name}))


def change_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    tensors = change(tensors) or tensors
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / WEIGHTS)


# -- configurations ---------------------------------------------------------------------------------------------------


def test_a_field_nobody_knows_is_refused_by_name(folder):
    change_config(folder, use_flux_capacitor=True)
    refused("'use_flux_capacitor' .True. is not known here", folder)


def test_fields_that_change_nothing_are_ignored(folder):
    change_config(folder, attention_dropout=0.5, _name_or_path="x", torch_dtype="bfloat16", pruned_heads={})
    change_config(folder, auto_map={"AutoModel": "evil.py"}, _attn_implementation_internal="someone/kernel")
    Transformer.from_pretrained(folder)


@pytest.mark.parametrize("fields", [{"pruned_heads": {"0": [1]}}, {"quantization_config": {"bits": 4}}])
def test_a_field_that_is_harmless_only_as_it_usually_is(folder, fields):
    change_config(folder, **fields)
    refused(f"{next(iter(fields))!r}.*is not known here", folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lama"}, "'lama' is none of the .* did you mean 'llama'"),
        ({"model_type": ["llama"]}, "is none of the"),
        ({"architectures": ["LlamaForWeather"]}, "'LlamaForWeather' is not known; .* LlamaForCausalLM"),
        ({"architectures": []}, "must name one class"),
        ({"architectures": "LlamaForCausalLM"}, "must name one class"),
        ({"hidden_act": "mish"}, "the activation 'mish' is none of"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "the rotary scaling 'spiral' is not known"),
        ({"rope_parameters": {"rope_type": "default", "twist": 3}}, "the rotary parameter 'twist' is not known"),
        ({"rope_parameters": [1]}, "the rotary parameter 1 is not known"),
        ({"rope_parameters": 3}, "cannot be"),
        ({"num_hidden_layers": "many"}, "is no number of layers"),
        ({"num_hidden_layers": 10**9}, "is no number of layers"),
        ({"num_hidden_layers": True}, "is no number of layers"),
        ({"num_attention_heads": 0}, "heads=0|cannot be"),
        ({"vocab_size": -1}, "vocab=-1 is too small"),
        ({"hidden_size": 36.5}, "cannot be"),
        ({"rms_norm_eps": "small"}, "eps='small' cannot be"),
    ],
)
def test_a_value_that_cannot_be_is_one_line(folder, fields, message):
    change_config(folder, **fields)
    refused(message, folder)


def test_a_number_without_a_root_is_refused(tmp_path):
    export_hf(toy("gemma2-2b"), tmp_path)
    change_config(tmp_path, query_pre_attn_scalar=-1)
    refused("query_pre_attn_scalar=-1 has no root", tmp_path)


def test_a_size_that_is_missing_is_named(folder):
    drop_field(folder, "hidden_size")
    refused("it lacks the field 'hidden_size'", folder)


def test_a_missing_class_is_the_families_first(folder):
    drop_field(folder, "architectures")
    assert Transformer.from_pretrained(folder).config == Transformer.from_pretrained(folder).config


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_unrolled_and_rolled_computes_the_same(name):
    config = preset(name)
    assert difference(roll(unroll(config)), config) is None
    assert isinstance(roll(unroll(config)), ModelConfig)


HOMELESS = {"vaswani-base", "vaswani-big"}  # interleaved sinusoids were never published in this form


@pytest.mark.parametrize("name", sorted(set(PRESETS) - HOMELESS))
def test_every_published_preset_can_be_said_in_a_published_family(name):
    family, cls, found = choose(preset(name))
    tied = preset(name).tie in ("output", "three_way")
    again = family.config(family.settle(family.tree(found, cls), found, tied), tied=tied)
    assert difference(again, preset(name)) is None


def test_heads_turned_in_part_are_written_only_where_the_class_heeds_it(tmp_path):
    """LLaMA's class reads no partial_rotary_factor: such a folder would load there and compute something else."""
    transformers = pytest.importorskip("transformers")
    from monoblock.families import llama

    config = vary(llama(vocab=61, width=36, depth=2, heads=3, kv_heads=3, context=37), rotary_dim=4)
    with pytest.raises(ConfigError, match=r"partial_rotary_factor.* turns whole heads"):
        choose(config, "llama")
    torch.manual_seed(1)
    model = Transformer(config).eval()
    export_hf(model, tmp_path)
    ids = torch.randint(61, (2, 11))
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(model(ids), theirs(input_ids=ids).logits, rtol=0, atol=1e-4)


def test_an_encoder_without_segments_is_not_written_as_one_whose_class_looks_them_up():
    bert = preset("bert-base")
    config = replace(bert, input=replace(bert.input, segments=0))
    with pytest.raises(ConfigError, match="type_vocab_size=0"):
        choose(config, "bert")


def test_what_no_family_can_say_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match="no published family can say this encoder-decoder model"):
        export_hf(toy("vaswani-base"), tmp_path)
    with pytest.raises(
        ConfigError, match=r"this decoder-only model is none of llama: llama cannot say input.scale='sqrt_width'"
    ):
        export_hf(toy("gemma2-2b"), tmp_path, family="llama")
    with pytest.raises(ConfigError, match="there is no family 'lama'; did you mean 'llama'"):
        export_hf(toy("llama-7b"), tmp_path, family="lama")
    assert not list(tmp_path.iterdir())


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(extra=torch.zeros(2)), "holds a tensor this family has no place for: 'extra'"),
        (lambda t: t.pop("model.norm.weight") is None, "it lacks: 'model.norm.weight'"),
        (
            lambda t: [t.pop(key) for key in list(t) if "layers.1.self_attn.q" in key or "input" in key] and None,
            "it lacks: .*and 2 more",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(35)}), "becomes decoder.norm.weight with shape"),
        (lambda t: t.update({"model.norm.weight": torch.ones(36).long()}), "holds torch.int64"),
    ],
)
def test_a_tensor_left_over_on_either_side_is_named(folder, change, message):
    change_weights(folder, lambda tensors: change(tensors) or None)
    refused(message, folder)


def test_the_tensors_decide_whether_the_output_is_tied(folder):
    untied = Transformer.from_pretrained(folder)
    assert untied.config.tie == "none"
    change_config(folder, tie_word_embeddings=True)  # a flag that lies
    assert Transformer.from_pretrained(folder).config.tie == "none"
    bit_equal(Transformer.from_pretrained(folder)(*given(untied)), untied(*given(untied)))
    change_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert Transformer.from_pretrained(folder).config.tie == "output"  # called tied, and the same tensor twice
    change_config(folder, tie_word_embeddings=False)
    change_weights(folder, lambda t: {key: tensor for key, tensor in t.items() if key != "lm_head.weight"})
    assert Transformer.from_pretrained(folder).config.tie == "output"


def test_files_of_other_years_are_read_by_the_names_they_have(tmp_path):
    model = toy("gpt2")
    export_hf(model, tmp_path)

    def old(tensors):  # without the prefix, and with the masks that used to be stored
        renamed = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
        return renamed | {"h.0.attn.bias": torch.ones(1, 1, 5, 5), "h.0.attn.masked_bias": torch.tensor(-1e4)}

    change_weights(tmp_path, old)
    bit_equal(Transformer.from_pretrained(tmp_path)(*given(model)), model(*given(model)))


def test_norms_called_gamma_and_beta_are_read(tmp_path):
    model = toy("bert-base")
    export_hf(model, tmp_path)
    spelled = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def old(tensors):
        for new, was in spelled.items():
            tensors = {key.replace(new, was): tensor for key, tensor in tensors.items()}
        return {f"bert.{key}": tensor for key, tensor in tensors.items()}

    change_weights(tmp_path, old)
    bit_equal(Transformer.from_pretrained(tmp_path)(*given(model)), model(*given(model)))


def test_one_tensor_under_two_names_must_be_one(tmp_path):
    model = toy("t5-small")
    export_hf(model, tmp_path)
    change_weights(tmp_path, lambda t: t.update({"encoder.embed_tokens.weight": t["shared.weight"].clone()}))
    bit_equal(Transformer.from_pretrained(tmp_path)(*given(model)), model(*given(model)))
    change_weights(tmp_path, lambda t: t.update({"encoder.embed_tokens.weight": t["shared.weight"] + 1}))
    refused("should be one tensor, and they differ", tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_weights_come_in_the_dtype_asked_for(folder, dtype):
    model = Transformer.from_pretrained(folder, dtype=dtype)
    assert {weight.dtype for weight in model.parameters()} == {dtype}


def test_training_a_loaded_model_leaves_its_file_alone(folder):
    before = (folder / WEIGHTS).read_bytes()
    model = Transformer.from_pretrained(folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    assert (folder / WEIGHTS).read_bytes() == before


# -- shards -----------------------------------------------------------------------------------------------------------


def shards(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "theirs"])
def test_large_models_are_written_in_several_files_and_read_back_bit_for_bit(tmp_path, ours):
    model = toy("mixtral-8x7b")
    write = model.save_pretrained if ours else lambda place, largest=10**10: export_hf(model, place, largest=largest)
    write(tmp_path, largest=40_000)
    names = shards(tmp_path)
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert all((tmp_path / name).stat().st_size < 60_000 for name in names)
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert set(places.values()) == set(names)
    loaded = Transformer.from_pretrained(tmp_path)
    for key, weight in model.state_dict().items():
        bit_equal(loaded.state_dict()[key], weight)
    write(tmp_path)  # again, in one file
    assert shards(tmp_path) == [WEIGHTS]
    assert not (tmp_path / INDEX).exists()
    assert not list(tmp_path.glob("*.tmp"))
    Transformer.from_pretrained(tmp_path)


# -- rules ------------------------------------------------------------------------------------------------------------

HEADS = Heads(heads=6, groups=3, key=5, value=5)
WHOLE = Heads(heads=4, groups=4, key=5, value=5)
QKV, EQUAL = [(30, 7), (15, 7), (15, 7)], [(20, 7)] * 3
STEPS = {
    "CONV": (CONV, HEADS, [(11, 7)]),
    "ROWS": (ROWS, HEADS, QKV),
    "CONV_ROWS": (CONV_ROWS, WHOLE, EQUAL),
    "GROUPED": (GROUPED, HEADS, QKV),
    "GROUPED, one each": (GROUPED, WHOLE, EQUAL),
    "SHARDED": (SHARDED, WHOLE, EQUAL),
    "HALVES": (HALVES, HEADS, [(11, 7)] * 2),
    "FLAT1": (FLAT1, HEADS, [(11, 7)]),
    "FLAT2": (FLAT2, HEADS, [(7,)]),
    "TURNED_EACH": (TURNED_EACH, HEADS, [(3, 11, 7)]),
    "WOVEN": (WOVEN, HEADS, [(3, 11, 7)] * 2),
    "WOVEN biases": (WOVEN, HEADS, [(3, 11)] * 2),
    "STACKED": (STACKED, HEADS, [(3, 11, 7)]),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_a_step_joins_it_splits_again(name):
    step, heads, shapes = STEPS[name]
    ours = [torch.randn(shape) for shape in shapes]
    theirs = step.join(ours, heads)
    assert all(torch.equal(one, other) for one, other in zip(step.split(theirs, heads), ours, strict=True))


def test_a_weight_without_a_rule_is_named():
    table = (Rule("decoder.norm", "norm"),)
    with pytest.raises(FileError, match=r"no rule .* input.token.weight"):
        list(plan(table, {"decoder.norm.weight": (3,), "input.token.weight": (3, 3)}, preset("gpt2")))


# -- what a load costs ------------------------------------------------------------------------------------------------

MEASURE = """
import sys, torch
from pathlib import Path
from monoblock.model import Transformer
def said(word):     # not getrusage, whose peak is inherited from whoever started the process
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) * 1024
Transformer.from_pretrained(sys.argv[2])                # whatever is made once is made
Path("/proc/self/clear_refs").write_text("5")           # the peak is counted from here
before = said("VmRSS")
model = Transformer.from_pretrained(sys.argv[1], dtype=sys.argv[3])
total = sum(weight.sum() for weight in model.parameters())    # every page is read
size = sum(weight.nbytes for weight in model.parameters())
print(size, said("VmHWM") - before, "transformers" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("name", ["gpt2", "llama-7b"])
@pytest.mark.parametrize(("stored", "wanted"), [("bf16", "fp32"), ("fp32", "fp32"), ("fp32", "bf16")])
def test_a_load_holds_little_more_than_the_weights(name, stored, wanted, tmp_path):
    """Halves widened, matrices transposed and plain ones: 1.2 times the weights in the wanted dtype."""
    from monoblock.knobs import vary

    torch.manual_seed(0)
    config = vary(preset(name), vocab=8000, width=512, depth=8, heads=8, context=64, hidden=2048)
    export_hf(Transformer(config).to({"bf16": torch.bfloat16, "fp32": torch.float32}[stored]), tmp_path / "large")
    export_hf(toy(name), tmp_path / "small")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "large"), str(tmp_path / "small"), wanted],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    size, held, foreign = done.stdout.split()
    assert int(size) > 5 * 10**7
    assert 0.9 * int(size) <= int(held) <= 1.2 * int(size)
    assert foreign == "False"
