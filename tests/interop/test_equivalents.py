"""Models that no published class builds in their own form are exported in an equivalent one, with the same logits."""

import json

import pytest
import torch
from model_folders import causal_folder, seq2seq_folder
from support import build_model
from torch.testing import assert_close

import monoblock as mb
from monoblock.cli.main import run
from monoblock.interop.huggingface.export import choose_family, export_hf

transformers = pytest.importorskip("transformers")
VOCAB, PAD, WIDTH = 61, 3, 24
ENCODER = {"vocab": VOCAB, "width": WIDTH, "depth": 2, "heads": 3, "context": 19, "norm_place": "pre"}
SEQ2SEQ = {"vocab": VOCAB, "width": WIDTH, "depth": 2, "heads": 3, "context": 19}
ENCODERS = {
    "classifier": mb.bert(**ENCODER, head="classifier", classes=5),
    "tagger": mb.bert(**ENCODER, head="tagger", classes=5),
    "masked_lm": mb.bert(**ENCODER, head="masked_lm"),
    "spans": mb.bert(**ENCODER, head="spans"),
}
ENCODER_DECODERS = {
    "post-norm": ("marian", mb.vaswani(**SEQ2SEQ)),
    "two vocabularies": ("marian", mb.vaswani(**SEQ2SEQ, target_vocab=43)),
    "pre-norm": ("pegasus", mb.vaswani(**SEQ2SEQ, norm_place="pre")),
}


def export(config, folder):
    """Export a model with random weights; return it in fp64, and the same model as transformers loads it."""
    model = build_model(config)
    ids = {"pad_token_id": PAD, "eos_token_id": 2, "decoder_start_token_id": 1}
    export_hf(model, folder, special_token_ids=ids)
    fields = json.loads((folder / "config.json").read_text())
    theirs = getattr(transformers, fields["architectures"][0]).from_pretrained(folder).eval()
    assert theirs.config.vocab_size == VOCAB
    return model, theirs, fields


def padded_ids(seed=0):
    ids = torch.randint(4, 43, (2, 11), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return ids.masked_fill(mask == 0, PAD), mask


@torch.no_grad()
@pytest.mark.parametrize("head", ENCODERS)
def test_a_pre_norm_encoder_is_a_roberta_prelayernorm(head, tmp_path):
    model, theirs, fields = export(ENCODERS[head], tmp_path)
    assert (fields["model_type"], fields["pad_token_id"]) == ("roberta-prelayernorm", PAD)
    ids, mask = padded_ids()
    output = theirs(input_ids=ids, attention_mask=mask)  # its positions start behind the padding token
    if head == "spans":
        reference = torch.stack([output.start_logits, output.end_logits], -1)
    else:
        reference = output.logits
    logits = model(ids, mask)
    valid = mask.bool() if logits.dim() == 3 else slice(None)
    assert_close(logits[valid], reference[valid], rtol=0, atol=2e-5)
    assert_close(mb.Transformer.from_pretrained(tmp_path)(ids, mask)[valid], logits[valid], rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_an_encoder_decoder_with_sinusoids_is_a_marian_or_a_pegasus(name, tmp_path):
    model_type, config = ENCODER_DECODERS[name]
    with pytest.raises(mb.ConfigError, match="no Hugging Face family"):
        choose_family(config)  # in its own form
    model, theirs, fields = export(config, tmp_path)
    assert fields["model_type"] == model_type
    (source, mask), target = padded_ids(), padded_ids(1)[0][:, :6]
    reference = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    assert_close(model(source, target, mask), reference, rtol=0, atol=2e-5)
    assert_close(mb.Transformer.from_pretrained(tmp_path)(source, target, mask), reference, rtol=0, atol=2e-5)
    options = {"max_new_tokens": 8, "num_beams": 1, "decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}
    new = model.generate(source, attention_mask=mask, **options)
    expected = theirs.generate(source, attention_mask=mask, **options, do_sample=False, bad_words_ids=None)
    assert new.tolist() == expected.tolist()


def test_a_translation_run_becomes_a_folder_of_transformers(tmp_path, capsys):
    folder = seq2seq_folder(tmp_path)
    assert run(["convert", str(folder), "--to", str(tmp_path / "out"), "--format", "hf"]) == 0, capsys.readouterr().err
    certificate = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert certificate["family"] == "marian"
    assert max(certificate["max_logit_difference"].values()) < 1e-5
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = json.loads((folder / "generation_config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        assert fields[name] == expected[name]
    texts = ["the 3 sons", "the sons"]
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    new = theirs.generate(**tokenizer(texts, return_tensors="pt", padding=True), num_beams=1, max_new_tokens=5)
    ours = mb.load(folder, device="cpu").generate(texts, num_beams=1, max_new_tokens=5)
    assert [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)] == [t.strip() for t in ours]
    assert mb.load(tmp_path / "out", device="cpu").generate(texts, num_beams=1, max_new_tokens=5) == ours


def test_transformers_reads_a_prompt_as_a_run_of_ours_does(tmp_path, capsys):
    """Without an end token, which would end the text before it is continued."""
    folder, text = causal_folder(tmp_path), "And the 3"
    assert run(["convert", str(folder), "--to", str(tmp_path / "out"), "--format", "hf"]) == 0, capsys.readouterr().err
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"]
    assert (
        ids == list(mb.load(folder).encode_prompt(text).ids) == list(mb.load(tmp_path / "out").encode_prompt(text).ids)
    )


def test_a_model_that_no_class_expresses_is_refused_with_the_reasons():
    config = mb.bert(**ENCODER, positions="rotary", head="tagger", classes=5)
    with pytest.raises(mb.ConfigError, match=r"no Hugging Face family .*: bert cannot express input\.positions=None; "):
        export_hf(mb.Transformer(config), "unused", special_token_ids={"pad_token_id": PAD})
    with pytest.raises(mb.ConfigError, match=r"cannot be written as marian: marian cannot express"):
        choose_family(mb.vaswani(**SEQ2SEQ), "marian")
