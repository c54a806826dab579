"""GGUF files: a model and its tokenizer are read back the same by us, by transformers and by llama.cpp."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from strings import WORDS, sample_strings
from tokenizer_support import spm_tokenizer
from tokenizers import ByteLevelBPETokenizer

import monoblock as mb
from monoblock.config.knobs import vary
from monoblock.config.parts import Scaling
from monoblock.config.presets import preset
from monoblock.errors import ConfigError
from monoblock.interop.certificate import compare_logits, load_reference, silence_transformers
from monoblock.interop.gguf.architectures import ARCHITECTURES, LM_CLASS
from monoblock.interop.gguf.reader import GgufWeights
from monoblock.interop.gguf.writer import save_gguf
from monoblock.interop.model_folder import ModelFolder
from monoblock.model import Transformer
from monoblock.tokenizers.formats.gguf import from_fields, read_gguf_header, to_fields
from monoblock.tokenizers.formats.vocabulary_files import FAMILIES, assemble_tokenizer_json, byte_level_sections

gguf = pytest.importorskip("gguf")
SIZES = {"vocab": 320, "width": 96, "depth": 2, "context": 64}


def config_from_fields(architecture, **options):
    """Build a configuration from the fields of a GGUF file."""
    fields = {
        "vocab_size": 320,
        "block_count": 2,
        "embedding_length": 96,
        "attention.head_count": 6,
        "context_length": 64,
    }
    fields |= {"feed_forward_length": 160, "attention.layer_norm_rms_epsilon": 1e-6, "attention.head_count_kv": 3}
    family = ARCHITECTURES[architecture]
    return family.build_config(family.config_tree(fields | options, LM_CLASS), fields, tied=True)


LLAMA = mb.llama(heads=6, hidden=160, kv_heads=3, **SIZES)
CONFIGS = {
    "llama": LLAMA,
    "llama tied, wide heads": replace(mb.llama(heads=6, hidden=160, kv_heads=2, head_dim=32, **SIZES), tie="output"),
    "llama 3": vary(LLAMA, scaling=Scaling(kind="llama3", factor=8.0, original_context=32)),
    "qwen2": config_from_fields("qwen2"),
    "qwen3": vary(preset("qwen3-0.6b"), heads=4, kv_heads=2, head_dim=32, hidden=160, **SIZES),
    "gemma": config_from_fields("gemma"),
    "gpt2": mb.gpt(heads=6, **SIZES),
}
READ_BY_TRANSFORMERS = ("llama", "qwen2", "gpt2")  # the others have options it does not read


def random_model(name):
    torch.manual_seed(3)
    model = Transformer(CONFIGS[name]).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return model


@pytest.fixture
def ids():
    return torch.randint(256, (1, 13), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_written_in_f32_is_read_back_bit_by_bit(name, ids, tmp_path):
    model = random_model(name)
    save_gguf(model, tmp_path / "model.gguf", kind="f32")
    loaded = mb.Transformer.from_pretrained(tmp_path / "model.gguf")
    # Gemma's norms are stored as 1 + w, which costs the last bit of w
    tolerance = 0.0 if name != "gemma" else 1e-6
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], weight, rtol=0, atol=tolerance)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids), model(ids), rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_computes_the_same_logits_from_the_file(name, ids, tmp_path):
    pytest.importorskip("accelerate")
    model = random_model(name)
    tokenizer = mb.Tokenizer.from_content(*spm_tokenizer())
    save_gguf(model, tmp_path / "model.gguf", kind="f32", tokenizer=tokenizer)
    with torch.no_grad(), silence_transformers():
        assert max(compare_logits(model, load_reference(ModelFolder(tmp_path / "model.gguf"))).values()) < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_gives_the_same_logits(name, ids, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    model = random_model(name)
    save_gguf(model, tmp_path / "model.gguf", kind="f32")
    options = {"n_ctx": 64, "n_threads": 1, "logits_all": True, "verbose": False}
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), **options)
    theirs.eval(ids[0].tolist())
    with torch.no_grad():
        logits = model(ids)[0]
    # llama.cpp keeps keys and values in f16
    torch.testing.assert_close(torch.tensor(np.array(theirs.scores[:13])), logits, rtol=0, atol=5e-3)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_fewer_bits_round_matrices_and_keep_vectors_exact(kind, tmp_path):
    model = random_model("llama")
    save_gguf(model, tmp_path / "model.gguf", kind=kind)
    loaded = mb.Transformer.from_pretrained(tmp_path / "model.gguf").state_dict()
    for name, weight in model.state_dict().items():
        if weight.dim() < 2:
            assert torch.equal(loaded[name], weight)
        elif kind == "f16":
            assert torch.equal(loaded[name], weight.half().float())
        elif ".query" not in name and ".key" not in name:
            blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
            assert np.array_equal(loaded[name].numpy(), gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
        else:
            torch.testing.assert_close(loaded[name], weight, rtol=0, atol=float(weight.abs().max()) / 200)


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16"]
)
def test_quantized_blocks_are_read_as_the_gguf_package_reads_them(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("monoblock.interop.gguf.reader.BLOCKS_PER_PASS", 3)  # several passes, the last one short
    ggml_type = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    rng = np.random.default_rng(7)
    rows = rng.integers(0, 60, (5, 512 // block * block_bytes), dtype=np.uint8)  # small bytes: no scale is infinite
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    stored = rows.view(np.float16) if kind == "F16" else rows
    writer.add_tensor("x", stored, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GgufWeights(tmp_path / "x.gguf", read_gguf_header(tmp_path / "x.gguf"))["x"]
    theirs = gguf.quants.dequantize(gguf.GGUFReader(tmp_path / "x.gguf").tensors[0].data, ggml_type)
    assert ours.shape == (5, 512)
    assert np.array_equal(ours.numpy(), theirs.reshape(5, 512))


def test_each_tensor_is_converted_once(tmp_path, monkeypatch):
    """The membership test of a Mapping would convert a tensor only to see that it is there."""
    model = mb.Transformer(mb.tiny("smollm2-135m"))
    save_gguf(model, tmp_path / "x.gguf", kind="f32")
    converted, convert = [], GgufWeights.__getitem__
    monkeypatch.setattr(GgufWeights, "__getitem__", lambda self, name: converted.append(name) or convert(self, name))
    mb.Transformer.from_pretrained(tmp_path / "x.gguf")
    assert len(converted) == len(set(converted)) > 9


def test_the_header_is_read_as_the_gguf_package_reads_it(tmp_path):
    save_gguf(random_model("llama 3"), tmp_path / "model.gguf", tokenizer=mb.Tokenizer.from_content(*spm_tokenizer()))
    header, theirs = read_gguf_header(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert header.fields == fields
    tensors = {info.name: (tuple(reversed(info.shape.tolist())), info.data_offset) for info in theirs.tensors}
    assert {name: (info.shape, header.data_offset + info.offset) for name, info in header.tensors.items()} == tensors


# -- tokenizers --------------------------------------------------------------------------------------------------------


def bpe_tokenizer():
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, vocab_size=300, show_progress=False)
    model = json.loads(tokenizer.to_str())["model"]
    special_tokens = {"eos_token": "<|endoftext|>"}
    sections = byte_level_sections(model["vocab"], model["merges"], "llama-bpe", FAMILIES["gpt2"], special_tokens)
    return assemble_tokenizer_json(sections, FAMILIES["gpt2"], special_tokens), special_tokens, "trained"


@pytest.mark.parametrize("build", [spm_tokenizer, bpe_tokenizer])
def test_a_tokenizer_is_written_and_read_back(build):
    data, special_tokens, source = build()
    ours = mb.Tokenizer.from_content(data, special_tokens, source)
    fields = to_fields(*ours.content(), 320)
    loaded = mb.Tokenizer.from_content(*from_fields(fields, "file"), "file")
    assert [loaded.encode(text) for text in sample_strings()] == [ours.encode(text) for text in sample_strings()]
    assert (loaded.bos_id, loaded.eos_id, loaded.unk_id) == (ours.bos_id, ours.eos_id, ours.unk_id)
    assert loaded.encode("the", add_specials=True) == ours.encode("the", add_specials=True)


@pytest.mark.parametrize("build", [spm_tokenizer, bpe_tokenizer])
def test_llama_cpp_tokenizes_as_we_do(build, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    ours = mb.Tokenizer.from_content(*build())
    save_gguf(random_model("llama"), tmp_path / "model.gguf", tokenizer=ours)
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    texts = [text for text in sample_strings(200) if text and "\0" not in text]
    expected = [theirs.tokenize(text.encode(), add_bos=False, special=False) for text in texts]
    assert [text for text, ids in zip(texts, expected, strict=True) if ours.encode(text) != ids][:3] == []


def test_a_tokenizer_without_a_gguf_name_is_refused(tmp_path):
    tokenizer = mb.Tokenizer.train("bpe", [" ".join(WORDS)], vocab_size=300)
    with pytest.raises(mb.FileError, match="GGUF has no name for this tokenizer's pre-tokenizer"):
        save_gguf(random_model("llama"), tmp_path / "model.gguf", tokenizer=tokenizer)
    assert not (tmp_path / "model.gguf").exists()


def test_an_encoder_and_an_unknown_storage_type_are_refused(tmp_path):
    with pytest.raises(mb.ConfigError, match="GGUF is written only for decoders"):
        save_gguf(Transformer(mb.bert(heads=6, **SIZES)), tmp_path / "model.gguf")
    with pytest.raises(mb.ConfigError, match="kind='q4' is none of"):
        save_gguf(random_model("llama"), tmp_path / "model.gguf", kind="q4")


def test_reading_a_missing_tokenizer_is_an_error(tmp_path):
    save_gguf(random_model("llama"), tmp_path / "model.gguf")
    with pytest.raises(mb.FileError, match="contains no tokenizer; load its model alone"):
        mb.Tokenizer.from_pretrained(tmp_path / "model.gguf")


def test_a_model_that_is_no_decoder_is_refused_with_another_format(tmp_path):
    with pytest.raises(ConfigError, match=r"GGUF is written only for decoders, but this model is vision; choose hf"):
        save_gguf(mb.Transformer(mb.tiny("vit-b16")), tmp_path / "vit.gguf")
