"""Models with LoRA adapters are written with the adapters merged; an adapter has the head it was trained with."""

import json
import random

import pytest
import tomli_w
import torch
from torch.testing import assert_close
from training_support import WORDS, train_to_end

import monoblock as mb
from monoblock.cli.main import run
from monoblock.errors import FileError
from monoblock.inspection.pruning import prune_heads
from monoblock.interop.gguf.writer import save_gguf
from monoblock.nn.lora import lora_layers

SIZES = {"vocab": 31, "width": 24, "depth": 2, "heads": 4, "context": 17}


def adapted_model(config=None, *, merged=True, bits=None):
    """A model with random adapters."""
    torch.manual_seed(1)
    model = mb.Transformer(config or mb.gpt(**SIZES)).eval()
    model = model if bits is None else mb.quantize(model, bits=bits)
    mb.add_lora(model, rank=3, targets=["q", "down"])
    with torch.no_grad():
        for _, layer in lora_layers(model):
            layer.b.normal_(std=0.3)
    if merged:
        mb.merge_lora(model)
    return model


def random_ids():
    return torch.randint(31, (3, 13), generator=torch.Generator().manual_seed(5))


# -- models with adapters ----------------------------------------------------------------------------------------------


def write_monoblock(model, path):
    model.save_pretrained(path)


def write_gguf(model, path):
    pytest.importorskip("gguf")
    save_gguf(model, path, kind="f32")


def write_quantized(model, path):
    mb.quantize(model, bits=8).save_pretrained(path)


@torch.no_grad()
@pytest.mark.parametrize("merged", [True, False], ids=["merged", "not merged"])
@pytest.mark.parametrize(
    ("write", "name", "tolerance"),
    [(write_monoblock, "out", 1e-6), (mb.export_hf, "out", 1e-6), (write_gguf, "out.gguf", 1e-6)]
    + [(write_quantized, "out", 0.03)],
    ids=["monoblock", "hf", "gguf", "quantized"],
)
def test_every_format_holds_the_merged_weights(write, name, tolerance, merged, tmp_path):
    model = adapted_model(merged=merged)
    expected, state = model(random_ids()), {key: tensor.clone() for key, tensor in model.state_dict().items()}
    write(model, tmp_path / name)
    assert_close(mb.Transformer.from_pretrained(tmp_path / name)(random_ids()), expected, rtol=0, atol=tolerance)
    assert all(
        torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items()
    )  # the model is not changed


@torch.no_grad()
def test_a_quantized_model_with_adapters_is_saved_dequantized(tmp_path):
    model = adapted_model(merged=False, bits=8)
    model.save_pretrained(tmp_path)
    loaded = mb.Transformer.from_pretrained(tmp_path)
    assert loaded.config.quantize is None
    assert_close(loaded(random_ids()), model(random_ids()), rtol=0, atol=1e-6)


@torch.no_grad()
def test_heads_are_pruned_and_positions_interpolated_in_a_model_with_adapters():
    model = adapted_model()
    pruned = [prune_heads(m, {"decoder.0.attention": [1]})(random_ids()) for m in (model, mb.fold_lora(model))]
    assert_close(*pruned, rtol=0, atol=1e-6)
    vision = adapted_model(mb.vit(image=8, patch=4, width=24, depth=1, heads=2, classes=3), merged=False)
    pixels = torch.randn(2, 3, 16, 16)
    resized = [mb.interpolate(m, 16)(pixels) for m in (vision, mb.fold_lora(vision))]
    assert_close(*resized, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of peft about its own settings
@torch.no_grad()
def test_the_merged_folder_gives_the_logits_of_peft(tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(3)
    sizes = {"vocab_size": 31, "n_positions": 17, "n_embd": 24, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "base")
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=5, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    for name, weight in theirs.named_parameters():
        if "lora_" in name:
            weight.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "adapter")
    model = mb.Transformer.from_pretrained(tmp_path / "base")
    mb.load_adapter(model, tmp_path / "adapter")
    mb.merge_lora(model)
    mb.export_hf(model, tmp_path / "merged")
    merged = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "merged")
    expected = theirs.eval()(random_ids()).logits
    assert_close(merged(random_ids()).logits, expected, rtol=0, atol=2e-5)


# -- an adapter with a new head ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A tiny RoBERTa without a classifier as transformers saves it, a LoRA classifier trained from it, and its data."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("published")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    sizes = {"hidden_size": 22, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 34}
    config = transformers.XLMRobertaConfig(
        vocab_size=len(words), max_position_embeddings=31, pad_token_id=0, initializer_range=0.2, **sizes
    )
    torch.manual_seed(2)
    transformers.XLMRobertaForMaskedLM(config).save_pretrained(folder / "base")
    (folder / "base" / "vocab.txt").write_text("\n".join(words))
    (folder / "base" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    rng = random.Random(5)
    rows = [f"{rng.choice(['bad', 'fair', 'good'])}\t{' '.join(rng.choices(WORDS, k=7))}\n" for _ in range(40)]
    (folder / "labelled.tsv").write_text("".join(rows))
    recipe = {
        "data": {"corpus": str(folder / "labelled.tsv")},
        "model": {"folder": str(folder / "base")},
        "lora": {"rank": 3, "targets": ["q", "v"]},
        "train": {"objective": "classification", "steps": 5, "batch": 5, "lr": 0.05, "device": "cpu", "eval_every": 0},
    }
    (folder / "lora.toml").write_text(tomli_w.dumps(recipe))
    with pytest.warns(UserWarning, match="usually has a unigram tokenizer"):  # these words are not of its family
        train_to_end(folder / "lora.toml", folder / "run")
    return folder


@pytest.mark.filterwarnings("ignore:.*usually has a unigram tokenizer")
@torch.no_grad()
@pytest.mark.parametrize("target_format", ["monoblock", "hf"])
def test_convert_merges_an_adapter_with_a_new_head_into_its_base(published, tmp_path, target_format, capsys):
    out = tmp_path / "out"
    arguments = ["--adapter", published / "run" / "adapter", "--to", out, "--format", target_format]
    assert run(["convert", str(published / "base"), *map(str, arguments)]) == 0, capsys.readouterr().err
    expected, ids = mb.Transformer.from_pretrained(published / "run"), torch.randint(5, 20, (3, 11))
    merged = mb.Transformer.from_pretrained(out)
    assert merged.config.head == expected.config.head
    assert_close(merged(ids), expected(ids), rtol=0, atol=1e-5)
    assert mb.load(out, device="cpu").labels == ["bad", "fair", "good"]
    if target_format == "hf":
        import transformers

        config = json.loads((out / "config.json").read_text())
        assert (config["model_type"], config["id2label"]["1"]) == ("xlm-roberta", "fair")  # the family of the base
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
        assert_close(theirs(ids).logits, expected(ids), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_load_adapter_gives_a_model_the_head_of_the_adapter_as_in_peft(published):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model, ids = mb.Transformer.from_pretrained(published / "base"), torch.randint(5, 20, (3, 11))
    mb.load_adapter(model, published / "run" / "adapter")
    assert (model.config.head.kind, model.config.head.classes, model.config.tie) == ("classifier", 3, "none")
    cls = transformers.AutoModelForSequenceClassification
    base = cls.from_pretrained(published / "base", num_labels=3)
    theirs = peft.PeftModel.from_pretrained(base, published / "run" / "adapter").eval()
    assert_close(model(ids), theirs(ids).logits, rtol=0, atol=1e-5)


def test_an_adapter_that_does_not_describe_its_head_needs_a_model_with_that_head(published, tmp_path):
    from safetensors.torch import load_file, save_file

    source = published / "run" / "adapter"
    (tmp_path / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    weights = load_file(source / "adapter_model.safetensors")
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        FileError, match=r"no '.*classifier.*'; give a model with the head that the adapter was trained"
    ):
        mb.load_adapter(mb.Transformer.from_pretrained(published / "base"), tmp_path)
    key = next(key for key in weights if "out_proj.weight" in key)
    metadata = {"monoblock_head": '{"head": {"kind": "classifier", "classes": 3, "bias": "learned", "pooler": "tanh"}}'}
    save_file(weights, tmp_path / "adapter_model.safetensors", metadata=metadata)
    with pytest.raises(FileError, match="the head of this adapter does not fit"):
        mb.load_adapter(mb.Transformer.from_pretrained(published / "base"), tmp_path)
    metadata = {"monoblock_head": metadata["monoblock_head"][:-1] + ', "tie": "none"}'}
    save_file({k: t for k, t in weights.items() if k != key}, tmp_path / "adapter_model.safetensors", metadata=metadata)
    model = mb.Transformer.from_pretrained(published / "base")
    with pytest.raises(FileError, match=r"lacks head\.output\.weight"):
        mb.load_adapter(model, tmp_path)
    assert model.config.head.kind == "masked_lm"
    assert not list(lora_layers(model))
