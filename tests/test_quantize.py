"""Small whole numbers for weights: stored as meant, models run with them, folders hold them, bytes add up."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import bit_equal, blocks, build, close, given, is_decoder, presets, read, tokens, toy
from torch import nn

import monoblock as mb
from monoblock.accounting.decoding import decoding
from monoblock.cli.main import run
from monoblock.config import ModelConfig, QuantizeConfig
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.quantize.convert import matrices, stored_formats
from monoblock.quantize.measure import loss, tensor_bytes
from monoblock.quantize.modules import Quantized
from monoblock.quantize.packing import pack, unpack

ROWS, INPUTS = 7, 53


def weight(rows=ROWS, inputs=INPUTS, seed=0):
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(stored, inputs):
    """The stored matrix, number by number, in Python's own arithmetic."""
    rows, groups = stored.scale.shape
    packed, scale = stored.packed.tolist(), stored.scale.double().tolist()
    least = None if stored.least is None else stored.least.double().tolist()
    size = stored.packed.shape[1] * (1 if least is None else 2) // groups
    out = []
    for row in range(rows):
        for column in range(inputs):
            group, chunk, place = column // size, column // 32, column % 32
            if least is None:
                out.append(scale[row][group] * packed[row][column])
            else:
                byte = packed[row][chunk * 16 + place % 16]
                out.append(least[row][group] + scale[row][group] * (byte % 16 if place < 16 else byte // 16))
    return torch.tensor(out, dtype=torch.float64).view(rows, inputs)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_unpacked_is_what_the_layout_says(bits, group):
    stored = pack(weight(), bits, group)
    close(unpack(stored, INPUTS, torch.float64), by_hand(stored, INPUTS))


def test_at_8_bits_no_number_is_off_by_more_than_half_a_step():
    stored = pack(weight(), 8, 32)
    step = stored.scale.double().repeat_interleave(32, 1)[:, :INPUTS]
    off = (unpack(stored, INPUTS, torch.float64) - weight()).abs()
    assert (off <= 0.5001 * step).all()
    assert stored.packed.abs().max() <= 127


def test_at_4_bits_the_search_beats_rounding_between_the_extremes():
    given = weight(31, 320)
    groups = given.unflatten(1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    found = unpack(pack(given, 4, 32), 320, torch.float64)
    assert (found - given).square().sum() < 0.95 * (plain.flatten(1) - given).square().sum()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_a_constant_group_is_kept(bits, value):
    made = unpack(pack(torch.full((3, 41), value), bits, 32), 41)
    torch.testing.assert_close(made, torch.full((3, 41), value), rtol=0.005, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e18])
@pytest.mark.parametrize("bits", [8, 4])
def test_tiny_and_huge_weights_keep_their_size(bits, scale):
    made = unpack(pack((weight() * scale).float(), bits, 32), INPUTS, torch.float64) / scale
    assert (made - weight()).norm() < (0.01 if bits == 8 else 0.12) * weight().norm()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(wrong):
    given = weight()
    given[3, 5] = wrong
    with pytest.raises(InputError, match="not a finite number"):
        pack(given, 8, 32)


# -- models -----------------------------------------------------------------------------------------------------------


def widened(small, original):
    """The original's configuration with the quantised numbers as plain weights: the reference for a quantised model."""
    model = build(original.config)
    state = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    for path, module in small.named_modules():
        if isinstance(module, Quantized):
            name = path if path in state else f"{path}.weight"
            assert state[name].shape == module.weight.shape
            state[name] = module.weight
    model.load_state_dict(state)
    return model.eval()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", presets())
def test_a_quantised_model_is_the_model_of_its_rounded_weights(name, bits):
    model = toy(name)
    small = mb.quantized(model, bits=bits)
    with torch.no_grad():
        close(small(*given(model)), widened(small, model)(*given(model)))
    assert small.config == dataclasses.replace(model.config, quantize=small.config.quantize)


@pytest.mark.parametrize("name", presets(is_decoder))
def test_a_quantised_decoder_makes_a_cache(name):
    small = mb.quantized(toy(name))
    with torch.no_grad():
        assert read(small, tokens(2, 5), cache=small.make_cache(2, 5)).isfinite().all()


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b", "bart-base"])
def test_every_matrix_but_the_routers_is_quantised_and_the_original_is_left_alone(name):
    model = build(toy(name).config)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    small = mb.quantized(model, bits=4)
    assert {path.split(".")[-1] for path, part in small.named_modules() if isinstance(part, nn.Linear)} <= {"router"}
    assert not list(matrices(small))
    assert not [key for key, one in small.named_parameters() if one.dim() > 1 and not _left(key)]
    for key, tensor in model.state_dict().items():
        bit_equal(tensor, before[key])


def _left(name):
    return any(word in name for word in ("router", "position", "segment", "_bias", "norm"))


def test_4_bits_keep_the_table_at_8_unless_asked_otherwise():
    kinds = {"input.token": torch.int8, "decoder.0.attention.query": torch.uint8}
    small = mb.quantized(toy("gpt2"), bits=4)
    assert all(small.get_submodule(path).packed.dtype == kind for path, kind in kinds.items())
    assert mb.quantized(toy("gpt2"), bits=4, table_bits=4).input.token.packed.dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_quantised_model_runs_in_any_dtype_and_keeps_its_scales(dtype):
    small = mb.quantized(toy("llama-7b"))
    other = mb.quantized(toy("llama-7b")).to(dtype)
    assert other(tokens()).dtype == dtype
    bit_equal(_scale(other), _scale(small))
    assert {one.dtype for one in toy("llama-7b").parameters()} == {torch.float32}, "the original is left alone"
    limit = 1e-4 if dtype == torch.float64 else 0.05
    assert (other(tokens()).double() - small(tokens()).double()).norm() < limit * small(tokens()).double().norm()


def _scale(model):
    return model.head.output.scale if model.head.output else model.input.token.scale


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bits": 5}, "bits=5"), ({"bits": 8, "group": 48}, "group=48"), ({"table_bits": 16}, "table_bits=16")],
)
def test_what_cannot_be_is_one_line(options, message):
    with pytest.raises(ConfigError, match=message):
        mb.quantized(toy("gpt2"), **options)


def test_a_model_is_quantised_once_and_not_built_quantised():
    small = mb.quantized(toy("gpt2"))
    with pytest.raises(InputError, match="quantised to 8 bits already"):
        mb.quantized(small)
    with pytest.raises(ConfigError, match="quantize=None"):
        mb.Transformer(small.config)


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b", "t5-small"])
def test_saved_and_read_back_bit_for_bit(name, bits, tmp_path):
    small = mb.quantized(toy(name), bits=bits)
    small.save_pretrained(tmp_path)
    loaded = mb.Transformer.from_pretrained(tmp_path).eval()
    assert loaded.config == small.config
    assert loaded.state_dict().keys() == small.state_dict().keys()
    for key, tensor in small.state_dict().items():
        assert loaded.state_dict()[key].dtype == tensor.dtype
        bit_equal(loaded.state_dict()[key], tensor)
    bit_equal(loaded(*given(small)), small(*given(small)))


def test_another_dtype_leaves_the_stored_numbers_alone(tmp_path):
    small = mb.quantized(toy("gpt2"))
    small.save_pretrained(tmp_path)
    loaded = mb.Transformer.from_pretrained(tmp_path, dtype="bf16")
    assert loaded(tokens()).dtype == torch.bfloat16
    formats = stored_formats(loaded)
    assert set(formats.values()) == {torch.int8, torch.bfloat16}
    for key in formats:
        bit_equal(loaded.state_dict()[key], small.state_dict()[key])


def test_a_wrong_format_in_the_file_is_named(tmp_path):
    mb.quantized(toy("gpt2")).save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held["input.token.packed"] = held["input.token.packed"].float()
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"input\.token\.packed holds torch\.float32"):
        mb.Transformer.from_pretrained(tmp_path)


# -- accounts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 32)])
@pytest.mark.parametrize("name", presets())
def test_the_account_of_a_quantised_model_is_its_bytes(name, bits, group):
    small = mb.quantized(toy(name), bits=bits, group=group)
    fixed = {key for key in small.state_dict() if key.endswith("fixed_bias")}  # no parameter, as in the count
    held = sum(tensor.nbytes for key, tensor in small.state_dict().items() if key not in fixed)
    found = mb.account(small.config)
    assert found.weight_bytes("fp32") == held
    assert found.parameters == mb.account(toy(name).config).parameters


def test_a_step_moves_the_bytes_that_are_stored():
    config = dataclasses.replace(mb.preset("gpt2"), quantize=QuantizeConfig(bits=8, group=64))
    one = decoding(config, prompt=1, new=1, dtype="fp32").bytes_moved
    wide = decoding(mb.preset("gpt2"), prompt=1, new=1, dtype="fp32").bytes_moved
    matrices = 12 * 12 * 768**2 + 50257 * 768
    assert wide - one == 4 * matrices - (matrices + matrices // 64 * 2)


def test_the_scheme_goes_to_json_and_back_and_old_files_have_none():
    config = dataclasses.replace(toy("gpt2").config, quantize=QuantizeConfig(bits=4, group=32))
    assert ModelConfig.from_json(config.to_json()) == config
    data = config.to_dict()
    data.pop("quantize")
    assert ModelConfig.from_dict(data).quantize is None
    assert blocks(config)


@torch.no_grad()
def test_loss_is_the_mean_over_every_token_but_the_first():
    model = toy("gpt2")
    context, ids = model.config.context, tokens(1, 3 * model.config.context + 4)[0]
    total = 0.0
    for start in range(0, len(ids) - 1, context):
        piece = ids[start : start + context + 1]
        logits = model(piece[None, :-1])[0].double().log_softmax(-1)
        total -= float(logits[torch.arange(len(piece) - 1), piece[1:]].sum())
    found = loss(model, [ids.tolist()])
    assert found.tokens == len(ids) - 1
    assert found.nats == pytest.approx(total / found.tokens, rel=1e-5)
    assert tensor_bytes(model) == sum(4 * one.numel() for one in model.parameters())


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    tokenizer = mb.Tokenizer.train("char", ["abcdefghij klmnop. " * 9])
    model = build(mb.gpt(vocab=tokenizer.vocab_size, width=36, depth=2, heads=3, context=23))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a bcd ef. " * 31)
    return tmp_path


def test_the_command_writes_a_folder_and_says_what_it_costs(folder, capsys):
    out = folder / "small"
    words = ["quantize", str(folder / "model"), "--bits", "4", "--data", str(folder / "text.txt"), "--json"]
    assert run([*words, "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    model, small = (mb.Transformer.from_pretrained(path).eval() for path in (folder / "model", out))
    documents = [mb.Tokenizer.from_pretrained(out).encode("a bcd ef. " * 31)]
    assert found["bytes"] == {"before": tensor_bytes(model), "after": tensor_bytes(small)}
    expected = loss(small, documents).perplexity / loss(model, documents).perplexity - 1
    assert found["perplexity_loss"] == pytest.approx(expected, rel=1e-6)
    assert small.config.quantize == QuantizeConfig(bits=4, group=32)


def test_the_command_refuses_in_one_line_and_touches_nothing(folder, capsys):
    assert run(["quantize", str(folder / "model"), "--out", str(folder / "model")]) == 2
    assert "there already" in capsys.readouterr().err
    assert run(["quantize", str(folder / "nowhere"), "--out", str(folder / "new")]) == 1
    assert run(["quantize", str(folder / "model"), "--out", str(folder / "new"), "--group", "31"]) == 2
    assert not (folder / "new").exists()
