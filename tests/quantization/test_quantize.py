"""Quantized weights: their layout, models that run with them, folders, accounting and the command."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import (
    assert_bit_equal,
    assert_near,
    block_configs,
    build_model,
    example_inputs,
    has_decoder,
    random_tokens,
    run_model,
    tiny_model,
    tiny_names,
)
from torch import nn

import monoblock as mb
from monoblock.accounting.decoding import decoding_cost
from monoblock.cli.main import run
from monoblock.cli.models import measure_loss, state_dict_bytes
from monoblock.config.model import ModelConfig, QuantizeConfig
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.quantization.convert import quantizable_matrices, stored_dtypes
from monoblock.quantization.modules import QuantizedMatrix
from monoblock.quantization.packing import pack, unpack

ROWS, INPUTS = 7, 53


def random_weight(rows=ROWS, inputs=INPUTS, seed=0):
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unpack_by_hand(matrix, inputs):
    """Unpack a matrix element by element in Python."""
    rows, groups = matrix.scale.shape
    packed, scale = matrix.packed.tolist(), matrix.scale.double().tolist()
    least = None if matrix.least is None else matrix.least.double().tolist()
    size = matrix.packed.shape[1] * (1 if least is None else 2) // groups
    values = []
    for row in range(rows):
        for column in range(inputs):
            group, chunk, offset = column // size, column // 32, column % 32
            if least is None:
                values.append(scale[row][group] * packed[row][column])
            else:
                byte = packed[row][chunk * 16 + offset % 16]
                values.append(least[row][group] + scale[row][group] * (byte % 16 if offset < 16 else byte // 16))
    return torch.tensor(values, dtype=torch.float64).view(rows, inputs)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("bits", [8, 4])
def test_unpacking_follows_the_documented_layout(bits, group):
    matrix = pack(random_weight(), bits, group)
    assert_near(unpack(matrix, INPUTS, torch.float64), unpack_by_hand(matrix, INPUTS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_unpacking_rounds_once(bits, dtype):
    """Not the product of scale and integer first, whose rounding error is larger than that of the weight."""
    matrix = pack(random_weight(), bits, 32)
    assert torch.equal(unpack(matrix, INPUTS, dtype), unpack_by_hand(matrix, INPUTS).float().to(dtype))


def test_at_8_bits_the_error_is_at_most_half_a_step():
    matrix = pack(random_weight(), 8, 32)
    step = matrix.scale.double().repeat_interleave(32, 1)[:, :INPUTS]
    error = (unpack(matrix, INPUTS, torch.float64) - random_weight()).abs()
    assert (error <= 0.5001 * step).all()
    assert matrix.packed.abs().max() <= 127


def test_at_4_bits_the_search_beats_rounding_between_the_extremes():
    weights = random_weight(31, 320)
    groups = weights.unflatten(1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    rounded = ((groups - low) / step).round() * step + low
    quantized = unpack(pack(weights, 4, 32), 320, torch.float64)
    assert (quantized - weights).square().sum() < 0.95 * (rounded.flatten(1) - weights).square().sum()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_a_constant_group_is_kept(bits, value):
    restored = unpack(pack(torch.full((3, 41), value), bits, 32), 41)
    torch.testing.assert_close(restored, torch.full((3, 41), value), rtol=0.005, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e18])
@pytest.mark.parametrize("bits", [8, 4])
def test_tiny_and_huge_weights_keep_their_size(bits, scale):
    restored = unpack(pack((random_weight() * scale).float(), bits, 32), INPUTS, torch.float64) / scale
    assert (restored - random_weight()).norm() < (0.01 if bits == 8 else 0.12) * random_weight().norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value):
    weights = random_weight()
    weights[3, 5] = value
    with pytest.raises(InputError, match="not a finite number"):
        pack(weights, 8, 32)


# -- models -----------------------------------------------------------------------------------------------------------


def dequantized_reference(quantized, original):
    """Build the original model with the dequantized weights: the reference for a quantized model."""
    model = build_model(original.config)
    state = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    for path, module in quantized.named_modules():
        if isinstance(module, QuantizedMatrix):
            name = path if path in state else f"{path}.weight"
            assert state[name].shape == module.weight.shape
            state[name] = module.weight
    model.load_state_dict(state)
    return model.eval()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", tiny_names())
def test_a_quantized_model_is_the_model_of_its_rounded_weights(name, bits):
    model = tiny_model(name)
    quantized = mb.quantize(model, bits=bits)
    with torch.no_grad():
        assert_near(quantized(*example_inputs(model)), dequantized_reference(quantized, model)(*example_inputs(model)))
    assert quantized.config == dataclasses.replace(model.config, quantize=quantized.config.quantize)


@pytest.mark.parametrize("name", tiny_names(has_decoder))
def test_a_quantized_decoder_makes_a_cache(name):
    quantized = mb.quantize(tiny_model(name))
    with torch.no_grad():
        assert run_model(quantized, random_tokens(2, 5), cache=quantized.make_cache(2, 5)).isfinite().all()


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b", "bart-base"])
def test_every_matrix_but_the_routers_is_quantized_and_the_original_is_not_changed(name):
    model = build_model(tiny_model(name).config)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    quantized = mb.quantize(model, bits=4)
    assert {path.split(".")[-1] for path, module in quantized.named_modules() if isinstance(module, nn.Linear)} <= {
        "router"
    }
    assert not list(quantizable_matrices(quantized))
    assert not [
        key for key, parameter in quantized.named_parameters() if parameter.dim() > 1 and not _is_not_quantized(key)
    ]
    for key, tensor in model.state_dict().items():
        assert_bit_equal(tensor, before[key])


def _is_not_quantized(name):
    return any(part in name for part in ("router", "position", "segment", "_bias", "norm"))


def test_the_token_table_has_8_bits_unless_table_bits_is_given():
    dtypes = {"input.token": torch.int8, "decoder.0.attention.query": torch.uint8}
    quantized = mb.quantize(tiny_model("gpt2"), bits=4)
    assert all(quantized.get_submodule(path).packed.dtype == dtype for path, dtype in dtypes.items())
    assert mb.quantize(tiny_model("gpt2"), bits=4, table_bits=4).input.token.packed.dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_quantized_model_runs_in_any_dtype_and_keeps_its_scales(dtype):
    quantized = mb.quantize(tiny_model("llama-7b"))
    converted = mb.quantize(tiny_model("llama-7b")).to(dtype)
    assert converted(random_tokens()).dtype == dtype
    assert_bit_equal(_scale(converted), _scale(quantized))
    assert {parameter.dtype for parameter in tiny_model("llama-7b").parameters()} == {torch.float32}, (
        "the original is not changed"
    )
    limit = 1e-4 if dtype == torch.float64 else 0.05
    assert (converted(random_tokens()).double() - quantized(random_tokens()).double()).norm() < limit * quantized(
        random_tokens()
    ).double().norm()


def _scale(model):
    return model.head.output.scale if model.head.output else model.input.token.scale


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits=5"),
        ({"bits": 8, "group": 48}, "group=48"),
        ({"table_bits": 16}, "table_bits=16"),
        ({"activation_bits": 4}, "activation_bits=4"),
    ],
)
def test_an_invalid_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        mb.quantize(tiny_model("gpt2"), **options)


def test_a_quantized_model_is_neither_quantized_again_nor_built_directly():
    quantized = mb.quantize(tiny_model("gpt2"))
    with pytest.raises(InputError, match="quantized to 8 bits already"):
        mb.quantize(quantized)
    with pytest.raises(ConfigError, match="quantize=None"):
        mb.Transformer(quantized.config)


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "activation_bits"), [(8, 16), (8, 8), (4, 8)])
@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b", "t5-small"])
def test_a_quantized_model_is_saved_and_loaded_bit_for_bit(name, bits, activation_bits, tmp_path):
    quantized = mb.quantize(tiny_model(name), bits=bits, activation_bits=activation_bits)
    quantized.save_pretrained(tmp_path)
    loaded = mb.Transformer.from_pretrained(tmp_path).eval()
    assert loaded.config == quantized.config
    assert loaded.state_dict().keys() == quantized.state_dict().keys()
    for key, tensor in quantized.state_dict().items():
        assert loaded.state_dict()[key].dtype == tensor.dtype
        assert_bit_equal(loaded.state_dict()[key], tensor)
    assert_bit_equal(loaded(*example_inputs(quantized)), quantized(*example_inputs(quantized)))


def test_loading_in_another_dtype_keeps_the_stored_integers_and_scales(tmp_path):
    quantized = mb.quantize(tiny_model("gpt2"))
    quantized.save_pretrained(tmp_path)
    loaded = mb.Transformer.from_pretrained(tmp_path, dtype="bf16")
    assert loaded(random_tokens()).dtype == torch.bfloat16
    dtypes = stored_dtypes(loaded)
    assert set(dtypes.values()) == {torch.int8, torch.bfloat16}
    for key in dtypes:
        assert_bit_equal(loaded.state_dict()[key], quantized.state_dict()[key])


def test_a_wrong_dtype_in_the_file_is_named(tmp_path):
    mb.quantize(tiny_model("gpt2")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["input.token.packed"] = tensors["input.token.packed"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"input\.token\.packed has dtype torch\.float32"):
        mb.Transformer.from_pretrained(tmp_path)


# -- accounts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 32)])
@pytest.mark.parametrize("name", tiny_names())
def test_the_account_of_a_quantized_model_counts_its_bytes(name, bits, group):
    quantized = mb.quantize(tiny_model(name), bits=bits, group=group)
    fixed = {key for key in quantized.state_dict() if key.endswith("fixed_bias")}  # not a parameter, so not counted
    stored_bytes = sum(tensor.nbytes for key, tensor in quantized.state_dict().items() if key not in fixed)
    report = mb.account(quantized.config)
    assert report.weight_bytes("fp32") == stored_bytes
    assert report.parameters == mb.account(tiny_model(name).config).parameters


def test_a_decoding_step_reads_the_stored_bytes():
    config = dataclasses.replace(mb.preset("gpt2"), quantize=QuantizeConfig(bits=8, group=64))
    quantized = decoding_cost(config, prompt=1, new=1, dtype="fp32").bytes_moved
    original = decoding_cost(mb.preset("gpt2"), prompt=1, new=1, dtype="fp32").bytes_moved
    matrices = 12 * 12 * 768**2 + 50257 * 768
    assert original - quantized == 4 * matrices - (matrices + matrices // 64 * 2)


def test_the_quantize_section_is_saved_as_json_and_may_be_left_out():
    config = dataclasses.replace(tiny_model("gpt2").config, quantize=QuantizeConfig(bits=4, group=32))
    assert ModelConfig.from_json(config.to_json()) == config
    data = config.to_dict()
    data["quantize"].pop("activation_bits")
    assert ModelConfig.from_dict(data).quantize == QuantizeConfig(bits=4, group=32, activation_bits=16)
    data.pop("quantize")
    assert ModelConfig.from_dict(data).quantize is None
    assert block_configs(config)


@torch.no_grad()
def test_loss_is_the_mean_over_every_token_but_the_first():
    model = tiny_model("gpt2")
    context, ids = model.config.context, random_tokens(1, 3 * model.config.context + 4)[0]
    total = 0.0
    for start in range(0, len(ids) - 1, context):
        window = ids[start : start + context + 1]
        logits = model(window[None, :-1])[0].double().log_softmax(-1)
        total -= float(logits[torch.arange(len(window) - 1), window[1:]].sum())
    loss, count = measure_loss(model, [ids.tolist()], len(ids), lambda count: None)
    assert count == len(ids) - 1
    assert loss == pytest.approx(total / count, rel=1e-5)
    assert state_dict_bytes(model) == sum(4 * weight.numel() for weight in model.parameters())


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    tokenizer = mb.Tokenizer.train("char", ["abcdefghij klmnop. " * 9])
    model = build_model(mb.gpt(vocab=tokenizer.vocab_size, width=36, depth=2, heads=3, context=23))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a bcd ef. " * 31)
    return tmp_path


def test_the_command_writes_a_folder_and_reports_bytes_and_perplexity(folder, capsys):
    out = folder / "small"
    args = ["quantize", str(folder / "model"), "--bits", "4", "--data", str(folder / "text.txt"), "--json"]
    args += ["--activation-bits", "8"]
    assert run([*args, "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    model, quantized = (mb.Transformer.from_pretrained(path).eval() for path in (folder / "model", out))
    documents = [mb.Tokenizer.from_pretrained(out).encode("a bcd ef. " * 31)]
    assert report["bytes"] == {"before": state_dict_bytes(model), "after": state_dict_bytes(quantized)}
    before, after = (measure_loss(one, documents, 1000, lambda count: None)[0] for one in (model, quantized))
    assert report["perplexity_loss"] == pytest.approx(math.exp(after - before) - 1, rel=1e-6)
    assert quantized.config.quantize == QuantizeConfig(bits=4, group=32, activation_bits=8)
    assert report["activation_bits"] == 8


def test_the_command_refuses_invalid_options_and_writes_nothing(folder, capsys):
    assert run(["quantize", str(folder / "model"), "--out", str(folder / "model")]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert run(["quantize", str(folder / "nowhere"), "--out", str(folder / "new")]) == 1
    assert run(["quantize", str(folder / "model"), "--out", str(folder / "new"), "--group", "31"]) == 2
    assert not (folder / "new").exists()
