"""`translate`, `evaluate`, `backtranslate` and `compare` on models of a few steps."""

import json

import model_folders
import pytest
import torch
import torch.nn.functional as F

import monoblock as mb

LSTM_RECIPE = model_folders.SEQ2SEQ_RECIPE.replace('family = "vaswani"', 'family = "lstm"').replace("heads = 2\n", "")
WORD_PAIRS = "".join(
    f"{w}\t{w[::-1]}\t{n % 3 + 1}\n" for n, w in enumerate(f"{a}{b}{c}" for a in "abcd" for b in "efg" for c in "hijk")
)
WORD_RECIPE = model_folders.SEQ2SEQ_RECIPE.replace('kind = "bpe"\nvocab = 270', 'kind = "char"\nvocab = 40')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("translate")


@pytest.fixture(scope="module", params=["transformer", "lstm"])
def model(folder, request):
    if request.param == "transformer":
        return model_folders.seq2seq_folder(folder)
    return model_folders.train_folder(folder, "recurrent", LSTM_RECIPE, model_folders.PAIRS)


@pytest.fixture(scope="module")
def encoder_decoder(folder):
    return folder / "both" if (folder / "both").exists() else model_folders.seq2seq_folder(folder)


@pytest.fixture(scope="module")
def trained_model(folder):
    """Train for enough steps that no translation is empty."""
    longer = model_folders.SEQ2SEQ_RECIPE.replace("steps = 3\n", "steps = 60\nlr = 5e-3\nwarmup = 5\n")
    assert longer != model_folders.SEQ2SEQ_RECIPE
    return model_folders.train_folder(folder, "fluent", longer, model_folders.PAIRS)


@pytest.fixture(scope="module")
def word_model(folder):
    return model_folders.train_folder(folder, "speller", WORD_RECIPE, WORD_PAIRS)


LINES = [f"the {n} sons and {'more ' * (n % 5)}" for n in range(20)] + ["", "the 3 sons", "  "]
STDIN = "".join(f"{line}\n" for line in LINES).encode()
SHORT = ["--max-new-tokens", 12]


def test_translations_keep_the_order_of_lines_for_every_batch_size(model, run_verb):
    pipe = mb.load(model)
    expected = [pipe.translate(line, num_beams=3, max_new_tokens=12) if line.strip() else "" for line in LINES]
    for size in (1, 7, 64):
        code, out, _ = run_verb(["translate", model, "--num-beams", 3, "--batch-size", size, *SHORT], STDIN)
        assert code == 0
        assert out.split("\n")[:-1] == expected
    assert expected[-1] == expected[-3] == ""


def test_json_has_the_source_and_hypotheses_with_scores(model, run_verb):
    code, out, _ = run_verb(
        ["translate", model, "--n-best", 2, "--json", "--alignment", *SHORT], b"the 3 sons\n\nthe 4 sons\n"
    )
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["source"] for row in rows] == ["the 3 sons", "", "the 4 sons"]
    assert [len(row["hypotheses"]) for row in rows] == [2, 2, 2]
    assert [one["text"] for one in rows[1]["hypotheses"]] == ["", ""]
    for row in (rows[0], rows[2]):
        first, second = row["hypotheses"]
        assert first["score"] >= second["score"]
        pairs = [tuple(map(int, pair.split("-"))) for pair in first["alignment"].split()]
        assert [target for _, target in pairs] == list(range(len(first["text"].split())))
        assert all(0 <= source < 3 for source, _ in pairs)


def test_scores_are_length_normalized_log_probabilities_of_the_model(model):
    pipe = mb.load(model)
    lines = ["the 3 sons", "the 44 sons and more"]
    greedy = pipe.translate(lines, n_best=1, num_beams=1, max_new_tokens=9, length_penalty=0.7)
    for line, (answer,) in zip(lines, greedy, strict=True):
        prompt = pipe.encode_prompt(line)
        decoder_ids = torch.tensor([[*prompt.ids, *answer.ids[:-1]]])
        with torch.no_grad():
            log_probabilities = pipe.model(torch.tensor([prompt.source]), decoder_ids).log_softmax(-1)[0]
        expected = (
            sum(log_probabilities[index, token].item() for index, token in enumerate(answer.ids))
            / len(answer.ids) ** 0.7
        )
        assert answer.score == pytest.approx(expected, abs=1e-4)
    for line, answers in zip(lines, pipe.translate(lines, n_best=3, max_new_tokens=9), strict=True):
        prompt = pipe.encode_prompt(line)
        for answer in answers:
            decoder_ids = torch.tensor([[*prompt.ids, *answer.ids[:-1]]])
            with torch.no_grad():
                log_probabilities = pipe.model(torch.tensor([prompt.source]), decoder_ids).log_softmax(-1)[0]
            total = sum(log_probabilities[index, token].item() for index, token in enumerate(answer.ids))
            assert answer.score == pytest.approx(total / len(answer.ids), abs=1e-4)


def test_a_text_on_the_command_line_is_translated(encoder_decoder, run_verb):
    code, out, err = run_verb(["translate", encoder_decoder, "the 5 sons", *SHORT])
    assert (code, out) == (0, mb.load(encoder_decoder).translate("the 5 sons", max_new_tokens=12) + "\n")
    assert "Try: monoblock evaluate" in err


def test_invalid_bytes_and_long_lines_are_one_line_errors(encoder_decoder, run_verb):
    code, _, err = run_verb(["translate", encoder_decoder], b"the 3 sons\nthe \xff sons\n")
    assert code == 1
    assert err.splitlines()[-1].startswith("error: standard input, line 2, byte 5: not UTF-8")
    long = ("the 3 sons went. " * 12).encode() + b"\n"
    code, out, err = run_verb(["translate", encoder_decoder, *SHORT], b"the 3 sons\n" + long)
    assert (code, out) == (1, "")
    assert "line 2 has" in err
    assert "the model reads at most 48; shorten it, or give --long split" in err
    code, out, _ = run_verb(["translate", encoder_decoder, "--long", "split", "--json", *SHORT], long)
    assert code == 0
    assert json.loads(out)["source"] == long.decode().rstrip("\n")
    _, alone, _ = run_verb(["translate", encoder_decoder, *SHORT], b"the 3 sons went.\n")
    assert json.loads(out)["hypotheses"][0]["text"] == " ".join([alone.strip()] * 12), "sentence by sentence"


def test_options_that_do_not_fit_the_model_are_errors(folder, encoder_decoder, run_verb):
    causal_model = model_folders.causal_folder(folder)
    assert run_verb(["translate", causal_model, "x"])[0] == 2
    assert run_verb(["translate", encoder_decoder, "x", "--n-best", 2, "--temperature", 1])[0] == 2
    assert run_verb(["translate", encoder_decoder, "x", "--to", "tamil"])[0] == 1
    assert run_verb(["translate", folder / "nothing", "x"])[0] == 1


# -- evaluate --------------------------------------------------------------------------------------------------------


def test_the_metrics_of_a_language_model_are_those_of_one_forward_pass(folder, run_verb):
    model = folder / "causal" if (folder / "causal").exists() else model_folders.causal_folder(folder)
    text = "And the 9 sons of the king.\n" * 3
    (folder / "short.txt").write_text(text)
    code, out, _ = run_verb(["evaluate", model, folder / "short.txt", "--split", "all", "--json"])
    assert code == 0
    result, pipe = json.loads(out), mb.load(model)
    ids = torch.tensor([pipe.tokenizer.encode(text) + [pipe.tokenizer.eos_id] * (pipe.tokenizer.eos_id is not None)])
    assert ids.shape[1] <= 49, "one block"
    with torch.no_grad():
        loss = F.cross_entropy(pipe.model(ids[:, :-1])[0], ids[0, 1:]).item()
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(loss / 0.693147 * ids.shape[1] / len(text.encode()), rel=1e-4)


def test_translations_are_evaluated_and_bounds_set_the_exit_code(model, folder, run_verb):
    sacrebleu = pytest.importorskip("sacrebleu")
    corpus = folder / "test.tsv"
    corpus.write_text(model_folders.PAIRS, encoding="utf-8")
    arguments = ["evaluate", model, corpus, "--split", "all", "--limit", 6, *SHORT]
    code, out, _ = run_verb([*arguments, "--json", "--samples", 2])
    assert code == 0
    result = json.loads(out)
    pairs = [line.split("\t") for line in model_folders.PAIRS.splitlines()[:6]]
    texts = mb.load(model).translate([source for source, _ in pairs], max_new_tokens=12)
    assert result["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, [[target for _, target in pairs]]).score)
    assert {"bleu_tokenized", "chrf", "signature", "accuracy"} < set(result)
    assert result["samples"][1] == {"source": pairs[1][0], "reference": pairs[1][1], "hypothesis": texts[1]}
    assert run_verb([*arguments, "--at-least", "bleu=0", "--at-most", "chrf=100"])[0] == 0
    code, _, err = run_verb([*arguments, "--at-least", "bleu=101"])
    assert code == 3
    assert "check failed: bleu" in err
    assert run_verb([*arguments, "--at-least", "blue=1"])[0] == 2
    assert run_verb([*arguments, "--at-least", "bleu"])[0] == 2


def test_single_words_are_evaluated_by_accuracy_and_rescored(word_model, folder, run_verb):
    (folder / "three").mkdir()
    rows = WORD_PAIRS.splitlines(keepends=True)
    for name, part in (("train", rows[:36]), ("valid", rows[36:42]), ("test", [*rows[42:], "zzz\tzz\t1\nzzz\tz\t2\n"])):
        (folder / "three" / f"{name}.tsv").write_text("".join(part))
    arguments = ["evaluate", word_model, folder / "three", "--n-best", 3, *SHORT]
    code, out, err = run_verb([*arguments, "--json", "--rescore", "--save-words", folder / "words.json"])
    assert code == 0
    result = json.loads(out)
    assert result["sources"] == 7, "zzz once"
    assert result["split"] == "test"
    assert set(result) >= {"accuracy", "top_k", "k", "cer", "rescored"}
    assert result["rescored"]["gain"] == pytest.approx(result["rescored"]["accuracy"] - result["accuracy"])
    assert "any target attested" in err
    _, out, _ = run_verb([*arguments, "--rescore"])
    for name in ("accuracy", "top_k", "attested"):
        assert 0 <= result[name] <= 1
        assert f"{100 * result[name]:.2f} %" in next(line for line in out.splitlines() if line.startswith(name))
    assert f"changes accuracy by {100 * result['rescored']['gain']:+.2f} points" in out
    counts = json.loads((folder / "words.json").read_text())["counts"]
    assert counts["hea"] == 1
    assert sum(counts.values()) == sum(int(row.split("\t")[2]) for row in rows[:36])
    assert run_verb(["translate", word_model, "aeh", "--words", folder / "words.json", *SHORT])[0] == 0


def test_an_ensemble_translates_and_is_evaluated(encoder_decoder, trained_model, word_model, run_verb):
    text = ["translate", trained_model, "the 3 sons", "--n-best", 2, *SHORT]
    _, single, _ = run_verb(text)
    code, same, _ = run_verb([*text, "--ensemble", trained_model, "--ensemble", trained_model])
    assert code == 0
    assert [line.split("\t")[1] for line in same.splitlines()] == [line.split("\t")[1] for line in single.splitlines()]
    code, _, err = run_verb([*text, "--ensemble", word_model])
    assert "has another tokenizer than" in err
    assert code == 1
    pipe = mb.load(trained_model, ensemble=[encoder_decoder])
    greedy = pipe.translate("the 3 sons", n_best=1, num_beams=1, max_new_tokens=12)[0]
    beams = pipe.translate("the 3 sons", n_best=1, num_beams=6, max_new_tokens=12)[0]
    assert greedy.score <= beams.score + 1e-5, "both are scores of the ensemble"
    evaluate = ["evaluate", word_model, "--ensemble", word_model, word_model.parent / "pairs.tsv", "--json", *SHORT]
    assert run_verb(evaluate)[0] == 0


def test_the_model_card_has_the_metrics_of_evaluate(encoder_decoder, folder, run_verb):
    pytest.importorskip("sacrebleu")
    first = (encoder_decoder / "README.md").read_text()
    assert "val_bleu" in first
    config = json.loads((encoder_decoder / "generation_config.json").read_text())
    assert (config["num_beams"], config["length_penalty"], config["do_sample"]) == (4, 1.0, False)
    assert config["decoder_start_token_id"] == mb.load(encoder_decoder).tokenizer.bos_id
    corpus = folder / "card.tsv"
    corpus.write_text(model_folders.PAIRS, encoding="utf-8")
    for _ in range(2):
        assert run_verb(["evaluate", encoder_decoder, corpus, "--split", "valid", "--card", *SHORT])[0] == 0
    card = (encoder_decoder / "README.md").read_text()
    assert card.startswith(first)
    assert card.count(f"## Measured on {corpus}, split valid") == 1
    assert "nrefs:1|case:mixed" in card


# -- back-translation ------------------------------------------------------------------------------------------------


def test_back_translation_writes_pairs_and_skips_empty_and_long_lines(trained_model, folder, run_verb):
    monolingual = folder / "mono.txt"
    monolingual.write_text("the 3 sons\n\n" + "the sons " * 60 + "\nthe 4 sons\n")
    arguments = ["backtranslate", trained_model, monolingual, "--out"]
    code, out, _ = run_verb([*arguments, folder / "beam.tsv", "--json"])
    assert code == 0
    assert json.loads(out) | {"file": ""} == {"file": "", "pairs": 2, "left_out": 2, "method": "beam", "noise": []}
    pairs = [line.split("\t") for line in (folder / "beam.tsv").read_text().splitlines()]
    assert [target for _, target in pairs] == ["the 3 sons", "the 4 sons"]
    pipe = mb.load(trained_model)
    assert [source for source, _ in pairs] == [" ".join(pipe.translate(t, num_beams=5).split()) for _, t in pairs]
    assert run_verb([*arguments, folder / "tagged.tsv", "--tag"])[0] == 0
    assert (folder / "tagged.tsv").read_text() == "".join(f"<bt> {s}\t{t}\n" for s, t in pairs)
    assert run_verb([*arguments, folder / "noised.tsv", "--method", "noised", "--noise", "blank,drop"])[0] == 0
    code, _, err = run_verb([*arguments, folder / "beam.tsv"])
    assert code == 2
    assert "already exists" in err
    assert run_verb([*arguments, folder / "x.tsv", "--method", "beem"])[0] == 2
    assert run_verb([*arguments, folder / "x.tsv", "--method", "sample", "--num-beams", 3])[0] == 2


def test_sampled_lines_do_not_depend_on_the_batch_size(trained_model, folder, run_verb):
    monolingual = folder / "same.txt"
    monolingual.write_text("the 3 sons\n" * 5)
    for size in (1, 3, 64):
        arguments = [
            "backtranslate",
            trained_model,
            monolingual,
            "--out",
            folder / f"drawn-{size}.tsv",
            "--method",
            "restricted",
        ]
        assert run_verb([*arguments, "--batch-size", size, "--seed", 4])[0] == 0
    one, three, many = ((folder / f"drawn-{size}.tsv").read_text() for size in (1, 3, 64))
    assert one == three == many
    assert len(set(one.splitlines())) > 1


def test_the_arms_of_a_comparison_share_budget_tokenizer_and_pairs(folder, run_verb):
    pytest.importorskip("sacrebleu")
    corpus = folder / "few.tsv"
    corpus.write_text(model_folders.PAIRS, encoding="utf-8")
    recipe = folder / "arms.toml"
    recipe.write_text(
        model_folders.SEQ2SEQ_RECIPE.format(corpus) + "[generate]\nmax_new_tokens = 8\nscored_rows = 2\n",
        encoding="utf-8",
    )
    arguments = ["compare", "backtranslation", f"recipe={recipe}", "pairs=30", "monolingual=20", "seeds=1,2", "limit=3"]
    arguments += [
        "arms=none,beam,tagged-noised",
        "tokenizer.vocab=280",
        "train.steps=40",
        "train.lr=5e-3",
        "train.warmup=5",
        "--keep",
        "--out",
        folder / "arms",
    ]
    code, out, _ = run_verb([*arguments, "--json"])
    assert code == 0
    result = json.loads(out)
    assert [row["arm"] for row in result["rows"]] == ["none", "beam", "tagged-noised"]
    assert all(len(row["values"]["chrf"]) == 2 for row in result["rows"])
    assert (result["about"]["options"]["pairs"], result["about"]["seeds"]) == (30, [1, 2])
    assert {path.name for path in (folder / "arms").iterdir()} >= {"result.json", "results.jsonl"}
    (work,) = (folder / "arms").glob("work-*")
    assert {path.name for path in work.iterdir()} == {"seed-1", "seed-2", "tokenizer"}
    seed = work / "seed-1"
    beam, tagged = ((seed / f"{arm}.tsv").read_text().splitlines() for arm in ("beam", "tagged-noised"))
    assert len(beam) == len(tagged) == 20
    assert all(line.startswith("<bt> ") for line in tagged)
    fingerprints = {
        json.loads((seed / arm / "config.json").read_text())["tokenizer"] for arm in ("none", "beam", "backward")
    }
    assert len(fingerprints) == 1
    before = (seed / "beam" / "model.safetensors").stat().st_mtime_ns
    assert run_verb([*arguments])[0] == 0, "finished arms are reused"
    assert (seed / "beam" / "model.safetensors").stat().st_mtime_ns == before
    none = ["--out", str(folder / "none")]
    assert run_verb(["compare", "backtranslation", "arms=beam,bean", *none])[0] == 2
    assert run_verb(["compare", "backtranslations", *none])[0] == 2
    assert run_verb(["compare", "backtranslation", "sead=3", *none])[0] == 2
    assert not (folder / "none").exists()


def test_the_lstm_arm_has_about_as_many_parameters(folder, run_verb):
    pytest.importorskip("sacrebleu")
    corpus = folder / "both.tsv"
    corpus.write_text(model_folders.PAIRS, encoding="utf-8")
    recipe = folder / "recurrence.toml"
    recipe.write_text(
        model_folders.SEQ2SEQ_RECIPE.format(corpus) + "[generate]\nmax_new_tokens = 8\nscored_rows = 2\n",
        encoding="utf-8",
    )
    arguments = ["compare", "recurrence", f"recipe={recipe}", "limit=3", "train.steps=2", "--out", folder / "lstm-arm"]
    code, out, _ = run_verb([*arguments, "--json"])
    assert code == 0
    sizes = [row["parameters"] for row in json.loads(out)["rows"]]
    assert 0.9 < sizes[1] / sizes[0] < 1.1


def test_an_lstm_language_model_generates_like_any_other(folder, run_verb):
    recipe = model_folders.CAUSAL_RECIPE.replace('family = "gpt"', 'family = "lstm"').replace("heads = 2\n", "")
    pipe = mb.load(model_folders.train_folder(folder, "speaking", recipe, model_folders.TEXT))
    ids = torch.tensor([pipe.tokenizer.encode("And the")])
    with torch.no_grad():
        for _ in range(7):
            ids = torch.cat((ids, pipe.model(ids)[:, -1:].argmax(-1)), 1)
    text = pipe.generate("And the", max_new_tokens=7, temperature=0)
    assert "And the" + text == pipe.tokenizer.decode(ids[0].tolist())
    assert "".join(pipe.stream("And the", max_new_tokens=7, temperature=0)) == text
    assert run_verb(["generate", folder / "speaking", "And the", "--max-new-tokens", 3])[0] == 0
