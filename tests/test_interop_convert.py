"""`monoblock convert`: between forms, from pickles too, with a certificate that an independent library signs."""

import json
import os
import zipfile

import pytest
import torch
from safetensors.torch import load_file

import monoblock as mb
from monoblock.cli.main import run
from monoblock.interop.certificate import compare, quiet, reference
from monoblock.interop.convert import opened, unpickle
from monoblock.interop.hf import export_hf
from monoblock.model import Transformer

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 34}
PAIR = {"d_model": 30, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 34, "decoder_ffn_dim": 34}
PAIR |= {"encoder_attention_heads": 3, "decoder_attention_heads": 5}
MARKS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"num_key_value_heads": 3, "head_dim": 14}),
    "bert": (transformers.BertConfig, transformers.BertForMaskedLM, {}),
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
    "marian": (  # its table of sines is computed, in whatever precision there is
        transformers.MarianConfig,
        transformers.MarianMTModel,
        PAIR | {"max_position_embeddings": 37, "pad_token_id": 60, "decoder_start_token_id": 60, "eos_token_id": 0},
    ),
    "whisper": (
        transformers.WhisperConfig,
        transformers.WhisperForConditionalGeneration,
        PAIR | {"num_mel_bins": 7, "max_source_positions": 13, "max_target_positions": 17} | MARKS,
    ),
    "electra": (transformers.ElectraConfig, transformers.ElectraForPreTraining, {"embedding_size": 14}),
    "clip_text_model": (
        transformers.CLIPTextConfig,
        transformers.CLIPTextModelWithProjection,
        {"projection_dim": 13, "max_position_embeddings": 37} | MARKS | {"eos_token_id": 60},
    ),
}
ALONE = ("bert", "electra", "clip_text_model")  # what does not go on token by token


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def published(kind, folder):
    """A tiny model of theirs with weights that matter, saved by their library."""
    config_class, model_class, more = MODELS[kind]
    sizes = {} if kind in ("t5", "marian", "whisper") else SIZES
    torch.manual_seed(1)
    model = model_class(config_class(vocab_size=61, **sizes, **more)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder)
    return model


def certificate(capsys, *words):
    assert run(["convert", *map(str, words)]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("kind", MODELS)
def test_the_last_line_is_a_certificate_of_equal_logits(kind, tmp_path, capsys):
    model = published(kind, tmp_path / "theirs")
    found = certificate(capsys, tmp_path / "theirs", "--to", tmp_path / "ours")
    assert list(found) == ["family", "parameters", "tensors", "max_logit_difference"]
    computed = sum(model.get_parameter(name).numel() for name in model._keys_to_ignore_on_save or () if "pos" in name)
    assert (found["family"], found["parameters"]) == (kind, model.num_parameters() - computed)
    apart = found["max_logit_difference"]
    ways = {"plain"} | (set() if kind == "whisper" else {"padded"}) | (set() if kind in ALONE else {"cached"})
    assert set(apart) == {f"{name}_{way}" for name in ("fp32", "fp64") for way in ways}
    assert all(value < (1e-4 if name.startswith("fp32") else 1e-9) for name, value in apart.items())
    assert mb.Transformer.from_pretrained(tmp_path / "ours").config.output_input.vocab == 61


def test_the_certificate_sees_a_wrong_weight(tmp_path):
    published("llama", tmp_path)
    ours = Transformer.from_pretrained(tmp_path).eval()
    with torch.no_grad(), quiet():
        theirs = reference(tmp_path)
        assert max(compare(ours, theirs).values()) < 1e-4
        ours.get_parameter("decoder.1.attention.key.weight").mul_(1.1)
        assert min(compare(ours, theirs).values()) > 1e-4


def test_a_reference_that_fails_is_said_and_nothing_is_claimed(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("two\nlines")

    published("llama", tmp_path / "theirs")
    monkeypatch.setattr("monoblock.interop.certificate.reference", fail)
    assert run(["convert", str(tmp_path / "theirs"), "--to", str(tmp_path / "ours")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["max_logit_difference"] is None
    assert "no answer (RuntimeError: two lines)" in err


def test_ours_to_theirs_and_on_to_gguf(tmp_path, capsys):
    torch.manual_seed(2)
    model = Transformer(mb.llama(vocab=61, width=96, depth=2, heads=6, hidden=64, context=32)).eval()
    model.save_pretrained(tmp_path / "ours")
    found = certificate(capsys, tmp_path / "ours", "--to", tmp_path / "theirs", "--format", "hf")
    assert found["family"] == "llama"
    assert max(found["max_logit_difference"].values()) < 1e-4
    pytest.importorskip("gguf")
    found = certificate(capsys, tmp_path / "theirs", "--to", tmp_path / "model.gguf", "--kind", "f32")
    again = Transformer.from_pretrained(tmp_path / "model.gguf")
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in model.state_dict().items())


def test_a_published_folder_written_anew_stays_of_its_family_and_is_what_is_compared(tmp_path, capsys, monkeypatch):
    config = transformers.Phi3Config(
        **SIZES | {"num_attention_heads": 3},
        vocab_size=61,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
        pad_token_id=0,
    )
    torch.manual_seed(3)
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path / "theirs")
    words = (tmp_path / "theirs", "--to", tmp_path / "ours", "--format", "hf")
    found = certificate(capsys, *words)
    assert max(found["max_logit_difference"].values()) < 1e-4
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["architectures"] == ["Phi3ForCausalLM"]

    def spoiled(model, folder, **given):
        with torch.no_grad():
            model.get_parameter("decoder.norm.weight").mul_(1.5)
        export_hf(model, folder, **given)

    monkeypatch.setattr("monoblock.interop.hf.export_hf", spoiled)
    found = certificate(capsys, *words, "--force")
    assert min(found["max_logit_difference"].values()) > 1e-3


def test_a_folder_is_not_converted_onto_itself(tmp_path, capsys):
    published("llama", tmp_path / "theirs")
    before = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    assert run(["convert", str(tmp_path / "theirs"), "--to", str(tmp_path / "theirs"), "--force"]) == 2
    assert "is what is converted; name another place" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()} == before


def pickled(folder, *, shards):
    """Put the weights of a folder into .bin files."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for shard in range(shards):
        file = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{shard}.bin"
        torch.save({name: weights[name].clone() for name in names[shard::shards]}, folder / file)
    if shards > 1:
        places = {name: f"pytorch_model-{n % shards}.bin" for n, name in enumerate(names)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_pickled_folder_is_read_by_the_converter_only(shards, tmp_path):
    published("llama", tmp_path)
    wanted = Transformer.from_pretrained(tmp_path).state_dict()
    wanted = {name: weight.clone() for name, weight in wanted.items()}
    pickled(tmp_path, shards=shards)
    with pytest.raises(mb.FileError, match="is a pickle: write monoblock convert"):
        Transformer.from_pretrained(tmp_path)
    with opened(tmp_path) as found:
        assert found.kind == "hf"
        assert all(torch.equal(found.model.state_dict()[name], weight) for name, weight in wanted.items())


@pytest.mark.parametrize("inside", [None, "state_dict", "model"])
def test_tensors_come_out_of_a_pickle_as_they_are(inside, tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7), "c": torch.randn(5, 3).T.half(), "d": torch.tensor(2.0)}
    torch.save(tensors if inside is None else {inside: tensors, "epoch": 3}, tmp_path / "x.pt")
    assert unpickle(tmp_path / "x.pt", tmp_path / "x.safetensors") == 4
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


class Payload:
    def __reduce__(self):
        return os.mkdir, (os.environ["MONOBLOCK_CANARY"],)


def test_a_pickle_that_would_run_something_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOBLOCK_CANARY", str(tmp_path / "canary"))
    torch.save({"a": torch.ones(2), "b": Payload()}, tmp_path / "x.pt")
    with pytest.raises(mb.FileError, match=r"it holds more than tensors, it asks for (posix|nt)\.mkdir"):
        unpickle(tmp_path / "x.pt", tmp_path / "x.safetensors")
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "x.safetensors").exists()
    torch.load(tmp_path / "x.pt", weights_only=False)  # and it would have
    assert (tmp_path / "canary").exists()


def test_a_pickle_that_unpacks_to_more_than_itself_is_refused_at_once(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    with pytest.raises(mb.FileError, match="unpack to more than itself"):
        unpickle(tmp_path / "x.pt", tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nothing", "--to", "out"], 1, "is no model folder"),
        (["x.pt", "--to", "out"], 1, "weights without a configuration"),
        (["x.txt", "--to", "out"], 1, "is no model; give a folder"),
        (["here", "--to", "here"], 2, "exists; name another place"),
        (["here"], 2, "Missing option '--to'"),
        (["here", "--to", "out", "--format", "onnx"], 2, "is not one of"),
    ],
)
def test_what_cannot_be_converted_is_one_line(words, code, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("x.pt", "x.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "here").mkdir()
    assert run(["convert", *words]) == code
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
