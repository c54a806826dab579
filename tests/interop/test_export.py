"""What a stored model has beside its weights goes along when it is written again, in Python as on the command line."""

import json

import pytest
import torch
from model_folders import CHAT_TEMPLATE, causal_folder, edit_json
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer

import monoblock as mb
from monoblock.cli.main import run
from monoblock.interop.convert import open_model, write_model
from monoblock.interop.gguf.writer import save_gguf
from monoblock.model import Transformer

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 290, "hidden_size": 36, "intermediate_size": 46, "num_hidden_layers": 2, "pad_token_id": 1}
SIZES |= {"num_attention_heads": 3, "max_position_embeddings": 37}


def save_phi3(folder, dtype=torch.bfloat16, **fields):
    """Save a Phi-3 of theirs with a tokenizer, and with settings of generation."""
    torch.manual_seed(1)
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES, **fields)).to(dtype)
    settings = {"temperature": 0.6, "top_p": 0.9, "top_k": 13, "do_sample": True, "eos_token_id": [2, 7]}
    model.generation_config = transformers.GenerationConfig(**settings)
    model.save_pretrained(folder)
    tokenizer = mb.Tokenizer.train("bpe", ["the cat sat on the mat " * 9], 290)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return model


def read(folder, name):
    return json.loads((folder / name).read_text())


def stored_dtypes(folder):
    return {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_keep_the_dtype_of_their_file_as_long_as_it_holds_them_exactly(dtype, tmp_path):
    save_phi3(tmp_path / "theirs", dtype)
    model = Transformer.from_pretrained(tmp_path / "theirs")
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    for name, save in {"hf": lambda path: mb.export_hf(model, path), "ours": model.save_pretrained}.items():
        save(tmp_path / name)
        assert stored_dtypes(tmp_path / name) == {dtype}
    with torch.no_grad():
        model.decoder.norm.weight.add_(1e-6)  # as after a step of training
    for name, save in {"hf": lambda path: mb.export_hf(model, path), "ours": model.save_pretrained}.items():
        save(tmp_path / name)
        assert stored_dtypes(tmp_path / name) == {torch.float32}
        restored = Transformer.from_pretrained(tmp_path / name)
        assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in restored.state_dict().items())
    assert read(tmp_path / "hf", "config.json")["dtype"] == "float32"


@pytest.mark.parametrize("target_format", ["hf", "monoblock"])
def test_a_dtype_that_is_asked_for_rounds_the_weights_and_the_certificate_says_by_how_much(
    target_format, tmp_path, capsys
):
    save_phi3(tmp_path / "theirs", torch.float32)
    args = ["convert", str(tmp_path / "theirs"), "--to", str(tmp_path / "out"), "--format", target_format]
    assert run([*args, "--dtype", "bf16"]) == 0
    out, err = capsys.readouterr()
    assert stored_dtypes(tmp_path / "out") == {torch.bfloat16}
    assert max(json.loads(out.splitlines()[-1])["max_logit_difference"].values()) < 1e-4  # of the rounded weights
    assert "rounded to bf16, which changes the logits by up to" in err
    assert "warning" not in err
    source, rounded = (Transformer.from_pretrained(tmp_path / name).state_dict() for name in ("theirs", "out"))
    assert all(torch.equal(tensor.bfloat16().float(), rounded[name]) for name, tensor in source.items())


def test_a_dtype_is_refused_where_it_means_nothing(tmp_path, capsys):
    save_phi3(tmp_path / "theirs")
    assert run(["convert", str(tmp_path / "theirs"), "--to", str(tmp_path / "x.gguf"), "--dtype", "fp32"]) == 2
    assert "write --kind f32, f16 or q8_0" in capsys.readouterr().err
    small = mb.quantize(Transformer.from_pretrained(tmp_path / "theirs"))
    with pytest.raises(mb.ConfigError, match="this model is quantized; leave it out"):
        small.save_pretrained(tmp_path / "small", dtype="bf16")


def test_another_family_than_that_of_the_source_is_said(tmp_path):
    save_phi3(tmp_path / "theirs")
    model = Transformer.from_pretrained(tmp_path / "theirs")
    changed = Transformer(mb.vary(model.config, qk_norm=True))
    changed.loaded_from = model.loaded_from
    with pytest.warns(UserWarning, match="written as qwen3: .* cannot be written as phi3"):
        mb.export_hf(changed, tmp_path / "out")
    fields = read(tmp_path / "out", "config.json")
    assert (fields["model_type"], fields["eos_token_id"]) == ("qwen3", [2, 7])
    assert read(tmp_path / "out", "generation_config.json")["top_k"] == 13


def test_a_model_whose_folder_is_gone_is_written_without_its_files_and_says_so(tmp_path):
    save_phi3(tmp_path / "theirs")
    model = Transformer.from_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs").rename(tmp_path / "moved")
    for save in (model.save_pretrained, lambda path: mb.export_hf(model, path)):
        with pytest.warns(UserWarning, match=r"is gone; its labels, tokenizer and settings are not written"):
            save(tmp_path / "out")


def test_a_model_may_be_saved_over_its_own_folder(tmp_path):
    save_phi3(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("tokenizer.json", "generation_config.json")}
    model = Transformer.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    mb.export_hf(Transformer.from_pretrained(tmp_path), tmp_path)
    assert read(tmp_path, "config.json")["model_type"] == "phi3"
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_code_and_links_beside_the_weights_are_not_copied(tmp_path):
    save_phi3(tmp_path / "theirs")
    fields = read(tmp_path / "theirs", "config.json") | {"auto_map": {"AutoModel": "code.Model"}, "_x": 1}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(fields))
    (tmp_path / "theirs" / "code.py").write_text("raise SystemExit")
    model = Transformer.from_pretrained(tmp_path / "theirs")
    mb.export_hf(model, tmp_path / "out")
    assert not {"auto_map", "_x"} & read(tmp_path / "out", "config.json").keys()
    assert not (tmp_path / "out" / "code.py").exists()
    (tmp_path / "theirs" / "vocab.txt").symlink_to("/etc/hostname")
    with pytest.raises(mb.FileError, match="a link that leads out of the folder"):
        mb.export_hf(model, tmp_path / "again")


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_model_fine_tuned_from_a_published_one_keeps_its_family_and_its_settings(tmp_path, capsys):
    save_phi3(tmp_path / "theirs", attention_dropout=0.25)
    (tmp_path / "book.txt").write_text("the cat sat on the mat. " * 99)
    tokenizer = mb.Tokenizer.from_pretrained(tmp_path / "theirs")
    ids = {"pad_token_id": tokenizer.pad_id, "bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    edit_json(tmp_path / "theirs", "config.json", lambda fields: fields.update(ids))
    args = ["finetune", str(tmp_path / "theirs"), str(tmp_path / "book.txt"), "train.steps=2", "train.epochs=0"]
    args += ["data.max_length=16", "train.eval_every=0", "train.save_every=0", "train.load_best=false"]
    assert run([*args, "generate.top_k=5", "--out", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    settings = read(tmp_path / "run", "generation_config.json")
    expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 5, "do_sample": True, "eos_token_id": [2, 7]}
    assert {name: settings[name] for name in expected} == expected
    assert "max_new_tokens" not in settings
    pipe = mb.load(tmp_path / "run")
    mb.export_hf(pipe.model, tmp_path / "out")
    fields = read(tmp_path / "out", "config.json")
    assert (fields["model_type"], fields["attention_dropout"]) == ("phi3", 0.25)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.generation_config.top_k == 5
    ids = torch.tensor([pipe.tokenizer.encode("the cat sat")])
    with torch.no_grad():
        torch.testing.assert_close(pipe.model(ids), theirs(ids).logits, rtol=0, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHAT_TEMPLATE


def test_a_run_is_exported_from_python_as_from_the_command_line(tmp_path):
    folder = causal_folder(tmp_path)
    mb.export_hf(mb.load(folder).model, tmp_path / "python")
    assert run(["convert", str(folder), "--to", str(tmp_path / "command"), "--format", "hf"]) == 0
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("python", "command"))
    assert first == second
    assert {"tokenizer.json", "generation_config.json"} <= first.keys()


# -- GGUF --------------------------------------------------------------------------------------------------------------


def save_gpt2(folder, **generation):
    """Save a GPT-2 of theirs with a byte-level tokenizer, which GGUF has a name for."""
    pytest.importorskip("gguf")
    vocabulary = ByteLevelBPETokenizer()
    vocabulary.train_from_iterator(["the cat sat on the mat"] * 3, vocab_size=270, show_progress=False)
    sizes = {"n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 37}
    torch.manual_seed(1)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=290, **sizes)).save_pretrained(folder)
    vocabulary.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


SETTINGS = {"do_sample": True, "temperature": 0.25, "top_k": 13, "top_p": 0.875, "repetition_penalty": 1.5}


def test_gguf_keeps_the_settings_it_has_room_for_and_names_the_others(tmp_path):
    folder, path = (
        save_gpt2(tmp_path / "theirs", **SETTINGS, max_new_tokens=9, no_repeat_ngram_size=3),
        tmp_path / "x.gguf",
    )
    lost = "no room for these settings of generation: max_new_tokens, no_repeat_ngram_size"
    with open_model(folder) as source, pytest.warns(UserWarning, match=lost):
        write_model(source, path, "gguf", kind="f32")
    options = mb.load(path).defaults.options
    assert all(options[name] == value for name, value in SETTINGS.items() if name != "do_sample")
    mb.export_hf(Transformer.from_pretrained(path), tmp_path / "back")
    assert read(tmp_path / "back", "generation_config.json") == SETTINGS
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == CHAT_TEMPLATE


def test_a_greedy_model_stays_greedy_in_gguf(tmp_path, capsys):
    folder = save_gpt2(tmp_path / "theirs", do_sample=False, temperature=0.7)
    assert run(["convert", str(folder), "--to", str(tmp_path / "x.gguf")]) == 0, capsys.readouterr().err
    assert mb.load(tmp_path / "x.gguf").defaults.options["temperature"] == 0.0


# -- quantized models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_folder_is_exported_dequantized_and_says_so(bits, tmp_path):
    save_phi3(tmp_path / "theirs")
    small = mb.quantize(Transformer.from_pretrained(tmp_path / "theirs"), bits=bits)
    small.save_pretrained(tmp_path / "small")
    assert read(tmp_path / "small", "generation_config.json")["top_k"] == 13
    model = Transformer.from_pretrained(tmp_path / "small")
    with pytest.warns(UserWarning, match=f"the weights are dequantized from {bits} bits"):
        mb.export_hf(model, tmp_path / "out")
    fields = read(tmp_path / "out", "config.json")
    assert (fields["model_type"], fields["architectures"]) == ("phi3", ["Phi3ForCausalLM"])
    theirs = transformers.Phi3ForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[5, 3, 17, 11]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=0, atol=1e-4)


def test_a_quantized_folder_becomes_a_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    model = Transformer(mb.llama(vocab=61, width=96, depth=2, heads=6, hidden=64, context=32)).eval()
    mb.quantize(model).save_pretrained(tmp_path / "small")
    small, ids = Transformer.from_pretrained(tmp_path / "small"), torch.tensor([[5, 3, 17, 11]])
    with pytest.warns(UserWarning, match="dequantized from 8 bits"):
        save_gguf(small, tmp_path / "model.gguf", kind="f32")
    with torch.no_grad():
        torch.testing.assert_close(Transformer.from_pretrained(tmp_path / "model.gguf")(ids), small(ids))


# -- tokenizers of other models ----------------------------------------------------------------------------------------


def test_another_tokenizer_of_the_same_size_is_noticed_in_a_converted_folder(tmp_path):
    save_phi3(tmp_path / "theirs")
    Transformer.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    own = mb.Tokenizer.from_pretrained(tmp_path / "ours")
    other = mb.Tokenizer.train("bpe", ["a tokenizer of another text, with other words " * 9], own.vocab_size)
    assert other.vocab_size == own.vocab_size
    mb.load(tmp_path / "ours")
    other.save_pretrained(tmp_path / "ours")
    with pytest.raises(mb.FileError, match="is not the one the model was trained with"):
        mb.load(tmp_path / "ours")


def test_a_tokenizer_of_another_family_is_noticed_although_its_size_fits(tmp_path):
    words = ["the cat sat on the mat " * 9]
    tokenizer = mb.Tokenizer.train("wordpiece", words, 290)
    config = transformers.GPT2Config(
        **{"vocab_size": tokenizer.vocab_size, "n_embd": 36, "n_layer": 1, "n_head": 3, "n_positions": 37},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    mb.load(tmp_path)  # exported together, for all that its files say
    edit_json(tmp_path, "tokenizer_config.json", lambda fields: fields.update(tokenizer_class="BertTokenizer"))
    with pytest.warns(UserWarning, match="a gpt2 model usually has a bpe tokenizer, but this one is wordpiece"):
        mb.load(tmp_path)
