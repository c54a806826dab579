"""GGUF: what is written is read back the same, by us, by transformers and by llama.cpp; and with its tokenizer."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from strings import WORDS, strings
from tokenizers import ByteLevelBPETokenizer

import monoblock as mb
from monoblock.errors import ConfigError
from monoblock.interop.certificate import compare, quiet, reference
from monoblock.interop.gguf import GgufWeights, save_gguf
from monoblock.interop.gguf_names import ARCHITECTURES, CLASS
from monoblock.knobs import vary
from monoblock.model import Transformer
from monoblock.presets import preset
from monoblock.schemes import Scaling
from monoblock.tokenizers import sentencepiece
from monoblock.tokenizers.gguf_header import read_head
from monoblock.tokenizers.gguf_vocab import from_fields, to_fields
from monoblock.tokenizers.layouts import LAYOUTS
from monoblock.tokenizers.published import assemble, byte_level, spm

gguf = pytest.importorskip("gguf")
SIZES = {"vocab": 320, "width": 96, "depth": 2, "context": 64}


def from_names(kind, **more):
    """A configuration by the words of GGUF itself."""
    words = {
        "vocab_size": 320,
        "block_count": 2,
        "embedding_length": 96,
        "attention.head_count": 6,
        "context_length": 64,
    }
    words |= {"feed_forward_length": 160, "attention.layer_norm_rms_epsilon": 1e-6, "attention.head_count_kv": 3}
    family = ARCHITECTURES[kind]
    return family.config(family.tree(words | more, CLASS), tied=True)


LLAMA = mb.llama(heads=6, hidden=160, kv_heads=3, **SIZES)
CONFIGS = {
    "llama": LLAMA,
    "llama tied, wide heads": replace(mb.llama(heads=6, hidden=160, kv_heads=2, head_dim=32, **SIZES), tie="output"),
    "llama 3": vary(LLAMA, scaling=Scaling(kind="llama3", factor=8.0, original_context=32)),
    "qwen2": from_names("qwen2"),
    "qwen3": vary(preset("qwen3-0.6b"), heads=4, kv_heads=2, head_dim=32, hidden=160, **SIZES),
    "gemma": from_names("gemma"),
    "gpt2": mb.gpt(heads=6, **SIZES),
}
IN_TRANSFORMERS = ("llama", "qwen2", "gpt2")  # with what else of theirs a file here needs


def built(name):
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
    model = built(name)
    save_gguf(model, tmp_path / "model.gguf", kind="f32")
    again = mb.Transformer.from_pretrained(tmp_path / "model.gguf")
    # 1 + w is stored for Gemma's norms, which costs the last bit of w
    exact = 0.0 if name != "gemma" else 1e-6
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], weight, rtol=0, atol=exact)
    with torch.no_grad():
        torch.testing.assert_close(again(ids), model(ids), rtol=0, atol=exact * 10)


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_transformers_reads_the_same_logits_from_it(name, ids, tmp_path):
    pytest.importorskip("accelerate")
    model = built(name)
    tokenizer = mb.Tokenizer.from_parts(*spm_tokenizer())
    save_gguf(model, tmp_path / "model.gguf", kind="f32", tokenizer=tokenizer)
    with torch.no_grad(), quiet():
        assert max(compare(model, reference(tmp_path / "model.gguf")).values()) < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_gives_the_same_logits(name, ids, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    model = built(name)
    save_gguf(model, tmp_path / "model.gguf", kind="f32")
    options = {"n_ctx": 64, "n_threads": 1, "logits_all": True, "verbose": False}
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), **options)
    theirs.eval(ids[0].tolist())
    with torch.no_grad():
        logits = model(ids)[0]
    # it keeps keys and values in f16
    torch.testing.assert_close(torch.tensor(np.array(theirs.scores[:13])), logits, rtol=0, atol=5e-3)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_what_is_written_in_fewer_bits_is_as_near_as_they_allow(kind, tmp_path):
    model = built("llama")
    save_gguf(model, tmp_path / "model.gguf", kind=kind)
    again = mb.Transformer.from_pretrained(tmp_path / "model.gguf").state_dict()
    for name, weight in model.state_dict().items():
        if weight.dim() < 2:
            assert torch.equal(again[name], weight)
        elif kind == "f16":
            assert torch.equal(again[name], weight.half().float())
        elif ".query" not in name and ".key" not in name:
            blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
            assert np.array_equal(again[name].numpy(), gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
        else:
            torch.testing.assert_close(again[name], weight, rtol=0, atol=float(weight.abs().max()) / 200)


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16"]
)
def test_blocks_are_worth_what_the_package_says(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("monoblock.interop.gguf.PASSING", 3)  # several passes, the last one short
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    draw = np.random.default_rng(7)
    rows = draw.integers(0, 60, (5, 512 // block * size), dtype=np.uint8)  # small bytes: no scale is infinite
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    stored = rows.view(np.float16) if kind == "F16" else rows
    writer.add_tensor("x", stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GgufWeights(tmp_path / "x.gguf", read_head(tmp_path / "x.gguf"))["x"]
    theirs = gguf.quants.dequantize(gguf.GGUFReader(tmp_path / "x.gguf").tensors[0].data, number)
    assert ours.shape == (5, 512)
    assert np.array_equal(ours.numpy(), theirs.reshape(5, 512))


def test_the_head_is_read_as_the_package_reads_it(tmp_path):
    save_gguf(built("llama 3"), tmp_path / "model.gguf", tokenizer=mb.Tokenizer.from_parts(*spm_tokenizer()))
    head, theirs = read_head(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    names = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert head.fields == names
    places = {one.name: (tuple(reversed(one.shape.tolist())), one.data_offset) for one in theirs.tensors}
    assert {name: (one.shape, head.data + one.offset) for name, one in head.tensors.items()} == places


# -- tokenizers --------------------------------------------------------------------------------------------------------


def spm_tokenizer():
    """A small model of SentencePiece's kind with bytes, laid out by hand: letters, and words by merges."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    types = [2, 3, 3, *([6] * 256)]
    letters = ["▁", *"etaoinsh"]
    pairs = ["th", "he", "an", "in", "▁t", "the", "▁th", "▁the"]
    pieces += letters + pairs
    types += [1] * (len(letters) + len(pairs))
    scores = [0.0] * 259 + [-100.0] * len(letters) + [-float(n) for n in range(len(pairs))]
    model = sentencepiece.Pieces(
        pieces=pieces, scores=scores, types=types, model_type=2, byte_fallback=True, collapse=False
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return spm(sentencepiece.checked(model, "hand"), LAYOUTS["llama"], named), named, "hand"


def bpe_tokenizer():
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([" ".join(WORDS)] * 3, vocab_size=300, show_progress=False)
    model = json.loads(trained.to_str())["model"]
    named = {"eos_token": "<|endoftext|>"}
    cut = byte_level(model["vocab"], model["merges"], "llama-bpe", LAYOUTS["gpt2"], named)
    return assemble(cut, LAYOUTS["gpt2"], named), named, "trained"


@pytest.mark.parametrize("make", [spm_tokenizer, bpe_tokenizer])
def test_a_tokenizer_goes_into_a_file_and_comes_back(make):
    data, named, source = make()
    ours = mb.Tokenizer.from_parts(data, named, source)
    fields = to_fields(*ours.content(), 320)
    again = mb.Tokenizer.from_parts(*from_fields(fields, "file"), "file")
    assert [again.encode(text) for text in strings()] == [ours.encode(text) for text in strings()]
    assert (again.bos_id, again.eos_id, again.unk_id) == (ours.bos_id, ours.eos_id, ours.unk_id)
    assert again.encode("the", add_specials=True) == ours.encode("the", add_specials=True)


@pytest.mark.parametrize("make", [spm_tokenizer, bpe_tokenizer])
def test_llama_cpp_cuts_text_as_we_do(make, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    ours = mb.Tokenizer.from_parts(*make())
    save_gguf(built("llama"), tmp_path / "model.gguf", tokenizer=ours)
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    texts = [text for text in strings(200) if text and "\0" not in text]
    cut = [theirs.tokenize(text.encode(), add_bos=False, special=False) for text in texts]
    assert [text for text, ids in zip(texts, cut, strict=True) if ours.encode(text) != ids][:3] == []


def test_a_tokenizer_that_gguf_has_no_words_for_is_refused(tmp_path):
    tokenizer = mb.Tokenizer.train("bpe", [" ".join(WORDS)], vocab_size=300)
    with pytest.raises(mb.FileError, match="GGUF has no name for how this tokenizer cuts text"):
        save_gguf(built("llama"), tmp_path / "model.gguf", tokenizer=tokenizer)
    assert not (tmp_path / "model.gguf").exists()


def test_a_model_that_gguf_has_no_words_for_is_refused(tmp_path):
    with pytest.raises(mb.ConfigError, match="GGUF is written for decoders"):
        save_gguf(Transformer(mb.bert(heads=6, **SIZES)), tmp_path / "model.gguf")
    with pytest.raises(mb.ConfigError, match="kind='q4' is none of"):
        save_gguf(built("llama"), tmp_path / "model.gguf", kind="q4")


def test_a_file_without_a_tokenizer_says_so(tmp_path):
    save_gguf(built("llama"), tmp_path / "model.gguf")
    with pytest.raises(mb.FileError, match="no list of texts"):
        mb.Tokenizer.from_pretrained(tmp_path / "model.gguf")


def test_what_is_no_decoder_is_refused_in_plain_words(tmp_path):
    with pytest.raises(ConfigError, match=r"GGUF is written for decoders; this is vision: write --format hf"):
        save_gguf(mb.Transformer(mb.tiny("vit-b16")), tmp_path / "vit.gguf")
