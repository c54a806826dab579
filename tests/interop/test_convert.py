"""`monoblock convert`: between formats and from pickles, with a comparison of logits against transformers."""

import json
import os
import zipfile

import pytest
import torch
from model_folders import causal_folder
from safetensors.torch import load_file

import monoblock as mb
from monoblock.cli.main import run
from monoblock.interop.certificate import compare_logits, load_reference, silence_transformers
from monoblock.interop.convert import open_model, pickle_to_safetensors
from monoblock.interop.huggingface.export import export_hf
from monoblock.interop.model_folder import ModelFolder
from monoblock.model import Transformer

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 34}
SEQ2SEQ_SIZES = {"d_model": 30, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 34, "decoder_ffn_dim": 34}
SEQ2SEQ_SIZES |= {"encoder_attention_heads": 3, "decoder_attention_heads": 5}
SPECIAL_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"num_key_value_heads": 3, "head_dim": 14}),
    "bert": (transformers.BertConfig, transformers.BertForMaskedLM, {}),
    "mpnet": (transformers.MPNetConfig, transformers.MPNetForMaskedLM, {}),
    "roberta": (transformers.RobertaConfig, transformers.RobertaForMaskedLM, {}),
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"num_key_value_heads": 3, "head_dim": 14, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "t5": (
        transformers.T5Config,
        transformers.T5ForConditionalGeneration,
        {"d_model": 30, "d_kv": 14, "num_layers": 2, "num_heads": 6, "d_ff": 34, "decoder_start_token_id": 0},
    ),
    "marian": (  # its sinusoids are computed, not stored
        transformers.MarianConfig,
        transformers.MarianMTModel,
        SEQ2SEQ_SIZES
        | {"max_position_embeddings": 37, "pad_token_id": 60, "decoder_start_token_id": 60, "eos_token_id": 0},
    ),
    "whisper": (
        transformers.WhisperConfig,
        transformers.WhisperForConditionalGeneration,
        SEQ2SEQ_SIZES | {"num_mel_bins": 7, "max_source_positions": 13, "max_target_positions": 17} | SPECIAL_IDS,
    ),
    "electra": (transformers.ElectraConfig, transformers.ElectraForPreTraining, {"embedding_size": 14}),
    "clip_text_model": (
        transformers.CLIPTextConfig,
        transformers.CLIPTextModelWithProjection,
        {"projection_dim": 13, "max_position_embeddings": 37} | SPECIAL_IDS | {"eos_token_id": 60},
    ),
}
WITHOUT_CACHE = ("bert", "mpnet", "roberta", "electra", "clip_text_model")  # models that do not decode token by token


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def save_published(kind, folder):
    """Save a tiny model of theirs, with no weight at its initial value, by their library."""
    config_class, model_class, options = MODELS[kind]
    sizes = {} if kind in ("t5", "marian", "whisper") else SIZES
    torch.manual_seed(1)
    model = model_class(config_class(vocab_size=61, **sizes, **options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder)
    return model


def run_convert(capsys, *args):
    assert run(["convert", *map(str, args)]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("model_type", MODELS)
def test_the_last_line_is_a_certificate_of_equal_logits(model_type, tmp_path, capsys):
    model = save_published(model_type, tmp_path / "theirs")
    certificate = run_convert(capsys, tmp_path / "theirs", "--to", tmp_path / "ours")
    assert list(certificate) == ["family", "parameters", "tensors", "max_logit_difference"]
    computed = sum(model.get_parameter(name).numel() for name in model._keys_to_ignore_on_save or () if "pos" in name)
    assert (certificate["family"], certificate["parameters"]) == (model_type, model.num_parameters() - computed)
    differences = certificate["max_logit_difference"]
    modes = (
        {"plain"}
        | (set() if model_type == "whisper" else {"padded"})
        | (set() if model_type in WITHOUT_CACHE else {"cached"})
    )
    assert set(differences) == {f"{name}_{mode}" for name in ("fp32", "fp64") for mode in modes}
    assert all(value < (1e-4 if name.startswith("fp32") else 1e-9) for name, value in differences.items())
    assert mb.Transformer.from_pretrained(tmp_path / "ours").config.target_input.vocab == 61


def test_the_certificate_notices_a_wrong_weight(tmp_path):
    save_published("llama", tmp_path)
    ours = Transformer.from_pretrained(tmp_path).eval()
    with torch.no_grad(), silence_transformers():
        theirs = load_reference(ModelFolder(tmp_path))
        assert max(compare_logits(ours, theirs).values()) < 1e-4
        ours.get_parameter("decoder.1.attention.key.weight").mul_(1.1)
        assert min(compare_logits(ours, theirs).values()) > 1e-4


def loud(model):
    """Multiply the matrices, so that scores are large and heads attend to few tokens."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.dim() == 2 else 1)
    return model


def test_limits_of_scores_are_compared_with_an_implementation_that_has_them(tmp_path, capsys):
    """The fused kernels of transformers, which it takes by default, drop the soft cap of Gemma 2."""
    sizes = SIZES | {"num_key_value_heads": 3, "head_dim": 14, "vocab_size": 61}
    model = loud(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, attn_logit_softcapping=2.0)))
    model.save_pretrained(tmp_path / "theirs")
    for source, target, name in (("theirs", "out", "hf"), ("out", "ours", "monoblock"), ("ours", "back", "hf")):
        certificate = run_convert(capsys, tmp_path / source, "--to", tmp_path / target, "--format", name)
        assert certificate["max_logit_difference"]["fp64_plain"] < 1e-5


@pytest.mark.parametrize("head_dim", [20, 14])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_gguf_with_heads_of_any_size_is_compared(qk_norm, head_dim, tmp_path, capsys):
    """transformers gives every Qwen 3 in GGUF heads of size 128."""
    pytest.importorskip("gguf")
    sizes = {"vocab": 61, "width": 36, "depth": 2, "heads": 6, "kv_heads": 3, "context": 37, "hidden": 46}
    model = loud(Transformer(mb.llama(**sizes, head_dim=head_dim, qk_norm=qk_norm)))
    model.save_pretrained(tmp_path / "ours")
    certificate = run_convert(capsys, tmp_path / "ours", "--to", tmp_path / "x.gguf", "--kind", "f32")
    assert certificate["max_logit_difference"]["fp64_plain"] < 1e-6


def test_gguf_with_rotary_factors_is_compared_with_its_source(tmp_path, capsys):
    """transformers ignores them, so that its logits are others."""
    pytest.importorskip("gguf")
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 16}
    sizes = SIZES | {"num_attention_heads": 3, "vocab_size": 61, "max_position_embeddings": 128}
    config = transformers.LlamaConfig(**sizes, rope_parameters=scaling)
    loud(transformers.LlamaForCausalLM(config)).save_pretrained(tmp_path / "theirs")
    certificate = run_convert(capsys, tmp_path / "theirs", "--to", tmp_path / "x.gguf", "--kind", "f32")
    assert certificate["max_logit_difference"]["fp64_plain"] < 1e-4
    assert run(["convert", str(tmp_path / "x.gguf"), "--to", str(tmp_path / "back"), "--format", "hf"]) == 0
    out, err = capsys.readouterr()
    assert "transformers ignores the rotary factors of a GGUF file, so" in err
    assert json.loads(out.splitlines()[-1])["max_logit_difference"]["fp64_plain"] < 1e-4


def test_a_gguf_file_that_transformers_cannot_read_is_compared_with_its_source(tmp_path, capsys, monkeypatch):
    pytest.importorskip("gguf")
    Transformer(mb.llama(vocab=61, width=36, depth=2, heads=3, context=37)).save_pretrained(tmp_path / "ours")

    def fail(*_):
        raise RuntimeError("no")

    monkeypatch.setattr("monoblock.interop.certificate.load_reference", fail)
    assert run(["convert", str(tmp_path / "ours"), "--to", str(tmp_path / "x.gguf"), "--kind", "f32"]) == 0
    out, err = capsys.readouterr()
    assert max(json.loads(out.splitlines()[-1])["max_logit_difference"].values()) < 1e-6
    assert "transformers failed (RuntimeError: no)" in err
    assert "the file was read again by monoblock, and compared with the source" in err


def test_a_reference_that_fails_is_logged_and_no_difference_is_reported(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("two\nlines")

    save_published("llama", tmp_path / "theirs")
    monkeypatch.setattr("monoblock.interop.certificate.load_reference", fail)
    assert run(["convert", str(tmp_path / "theirs"), "--to", str(tmp_path / "ours")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["max_logit_difference"] is None
    assert "transformers failed (RuntimeError: two lines)" in err


def test_a_monoblock_folder_is_converted_to_hugging_face_and_then_to_gguf(tmp_path, capsys):
    torch.manual_seed(2)
    model = Transformer(mb.llama(vocab=61, width=96, depth=2, heads=6, hidden=64, context=32)).eval()
    model.save_pretrained(tmp_path / "ours")
    certificate = run_convert(capsys, tmp_path / "ours", "--to", tmp_path / "theirs", "--format", "hf")
    assert certificate["family"] == "llama"
    assert max(certificate["max_logit_difference"].values()) < 1e-4
    pytest.importorskip("gguf")
    certificate = run_convert(capsys, tmp_path / "theirs", "--to", tmp_path / "model.gguf", "--kind", "f32")
    loaded = Transformer.from_pretrained(tmp_path / "model.gguf")
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:GGUF has no room for these settings of generation. max_new_tokens")
def test_a_run_whose_tokenizer_gguf_cannot_name_is_written_without_it(tmp_path, capsys):
    gguf = pytest.importorskip("gguf")
    folder, path = causal_folder(tmp_path), tmp_path / "model.gguf"
    assert run(["convert", str(folder), "--to", str(path)]) == 1
    assert "write the file without the tokenizer: --no-tokenizer" in capsys.readouterr().err
    assert not list(tmp_path.glob("model.gguf*"))
    certificate = run_convert(capsys, folder, "--to", path, "--no-tokenizer", "--kind", "f32")
    assert max(certificate["max_logit_difference"].values()) < 1e-4  # of transformers, with a context of 48
    fields = gguf.GGUFReader(path).fields
    assert (fields["tokenizer.ggml.model"].contents(), fields["gpt2.vocab_size"].contents()) == ("no_vocab", 290)
    with pytest.raises(mb.FileError, match="contains no tokenizer; load its model alone"):
        mb.load(path)
    certificate = run_convert(capsys, path, "--to", tmp_path / "back", "--format", "hf")
    assert max(certificate["max_logit_difference"].values()) < 1e-4
    assert not (tmp_path / "back" / "tokenizer.json").exists()


def test_a_rewritten_hugging_face_folder_keeps_its_family_and_is_compared(tmp_path, capsys, monkeypatch):
    config = transformers.Phi3Config(
        **SIZES | {"num_attention_heads": 3},
        vocab_size=61,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
        pad_token_id=0,
    )
    torch.manual_seed(3)
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path / "theirs")
    args = (tmp_path / "theirs", "--to", tmp_path / "ours", "--format", "hf")
    certificate = run_convert(capsys, *args)
    assert max(certificate["max_logit_difference"].values()) < 1e-4
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["architectures"] == ["Phi3ForCausalLM"]

    def export_wrong_weights(model, folder, **options):
        with torch.no_grad():
            model.get_parameter("decoder.norm.weight").mul_(1.5)
        export_hf(model, folder, **options)

    monkeypatch.setattr("monoblock.interop.convert.export_hf", export_wrong_weights)
    certificate = run_convert(capsys, *args, "--force")
    assert min(certificate["max_logit_difference"].values()) > 1e-3


def test_a_field_without_effect_is_ignored_on_request(tmp_path, capsys):
    save_published("llama", tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"internal_version": "v2"}))
    args = (tmp_path / "theirs", "--to", tmp_path / "ours")
    assert run(["convert", *map(str, args)]) == 1
    assert "--ignore-field 'internal_version'" in capsys.readouterr().err
    certificate = run_convert(capsys, *args, "--ignore-field", "internal_version")
    assert max(certificate["max_logit_difference"].values()) < 1e-4


def test_a_folder_is_not_converted_onto_itself(tmp_path, capsys):
    save_published("llama", tmp_path / "theirs")
    before = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    assert run(["convert", str(tmp_path / "theirs"), "--to", str(tmp_path / "theirs"), "--force"]) == 2
    assert "is the model to be converted; write to another path" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()} == before


def pickle_weights(folder, *, shards):
    """Move the weights of a folder into .bin files."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for shard in range(shards):
        file = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{shard}.bin"
        torch.save({name: weights[name].clone() for name in names[shard::shards]}, folder / file)
    if shards > 1:
        weight_map = {name: f"pytorch_model-{n % shards}.bin" for n, name in enumerate(names)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("shards", [1, 2])
def test_only_the_converter_reads_a_pickled_folder(shards, tmp_path):
    save_published("llama", tmp_path)
    expected = Transformer.from_pretrained(tmp_path).state_dict()
    expected = {name: weight.clone() for name, weight in expected.items()}
    pickle_weights(tmp_path, shards=shards)
    with pytest.raises(mb.FileError, match="is a pickle: write monoblock convert"):
        Transformer.from_pretrained(tmp_path)
    with open_model(tmp_path) as source:
        assert source.folder.format == "hf"
        assert all(torch.equal(source.model.state_dict()[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_a_pickle_is_converted_with_its_tensors_unchanged(key, tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7), "c": torch.randn(5, 3).T.half(), "d": torch.tensor(2.0)}
    torch.save(tensors if key is None else {key: tensors, "epoch": 3}, tmp_path / "x.pt")
    assert pickle_to_safetensors(tmp_path / "x.pt", tmp_path / "x.safetensors") == 4
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


class Payload:
    def __reduce__(self):
        return os.mkdir, (os.environ["MONOBLOCK_CANARY"],)


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOBLOCK_CANARY", str(tmp_path / "canary"))
    torch.save({"a": torch.ones(2), "b": Payload()}, tmp_path / "x.pt")
    with pytest.raises(mb.FileError, match=r"it contains more than tensors: it would call (posix|nt)\.mkdir"):
        pickle_to_safetensors(tmp_path / "x.pt", tmp_path / "x.safetensors")
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "x.safetensors").exists()
    torch.load(tmp_path / "x.pt", weights_only=False)  # an unsafe load would have run it
    assert (tmp_path / "canary").exists()


def test_a_zip_bomb_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    with pytest.raises(mb.FileError, match="unpack to more bytes than it has"):
        pickle_to_safetensors(tmp_path / "x.pt", tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["nothing", "--to", "out"], 1, "is not a model folder"),
        (["x.pt", "--to", "out"], 1, "weights without a configuration"),
        (["x.txt", "--to", "out"], 1, "is not a model; give a folder"),
        (["here", "--to", "here"], 2, "already exists; give another"),
        (["here"], 2, "Missing option '--to'"),
        (["here", "--to", "out", "--format", "onnx"], 2, "is not one of"),
    ],
)
def test_a_source_that_cannot_be_converted_is_a_one_line_error(args, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("x.pt", "x.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "here").mkdir()
    assert run(["convert", *args]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


# -- fields of config.json that are no sizes ---------------------------------------------------------------------------


def test_a_multi_label_classifier_stays_one_in_every_format(tmp_path, capsys):
    config = transformers.BertConfig(
        **SIZES, vocab_size=61, num_labels=3, problem_type="multi_label_classification", max_position_embeddings=37
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "theirs")
    run_convert(capsys, tmp_path / "theirs", "--to", tmp_path / "ours")
    assert Transformer.from_pretrained(tmp_path / "ours").config.head.multi_label
    run_convert(capsys, tmp_path / "ours", "--to", tmp_path / "back", "--format", "hf")
    back = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert (back.problem_type, back.num_labels) == ("multi_label_classification", 3)
    with pytest.raises(mb.ConfigError, match="multi_label=True is for a classifier"):
        mb.HeadConfig(kind="tagger", classes=3, multi_label=True)


@pytest.mark.parametrize("name", ["gpt2", "bart-base", "modernbert-base", "t5-small", "mt5-small"])
def test_no_token_id_is_that_of_a_published_model(name, tmp_path):
    """Of a model with a vocabulary of 61 tokens."""
    export_hf(Transformer(mb.tiny(name)), tmp_path, special_token_ids={"eos_token_id": 3})
    config = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    ids = {key: value for key, value in config.items() if key.endswith("_token_id") and value is not None}
    assert ids.pop("decoder_start_token_id", 0) == ids.get("pad_token_id", 0)  # with which `generate` starts a target
    assert ids == {"eos_token_id": 3} | {key: ids[key] for key in ids if key == "pad_token_id"}


def test_the_token_ids_are_those_of_the_tokenizer_and_of_the_generation_config(tmp_path, capsys):
    ids = {"bos_token_id": 5, "eos_token_id": 3, "pad_token_id": 1, "decoder_start_token_id": 7}
    Transformer(mb.tiny("bart-base")).save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "generation_config.json").write_text(json.dumps({**ids, "max_new_tokens": 9}))
    run_convert(capsys, tmp_path / "ours", "--to", tmp_path / "out", "--format", "hf")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: value for key, value in fields.items() if key.endswith("_token_id") and value is not None} == ids
