"""translate, evaluate, backtranslate and compare, on models of a few steps: the words, the order, the bad lines."""

import io
import json
import sys
from types import SimpleNamespace

import decoding_folders as folders
import pytest
import torch
import torch.nn.functional as F

import monoblock as mb
from monoblock.cli.main import run

LSTM = folders.BOTH.replace('family = "vaswani"', 'family = "lstm"').replace("heads = 2\n", "")
WORDS = "".join(
    f"{w}\t{w[::-1]}\t{n % 3 + 1}\n" for n, w in enumerate(f"{a}{b}{c}" for a in "abcd" for b in "efg" for c in "hijk")
)
SPELL = folders.BOTH.replace('kind = "bpe"\nvocab = 270', 'kind = "char"\nvocab = 40')


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("translate")


@pytest.fixture(scope="module", params=["transformer", "lstm"])
def model(place, request):
    if request.param == "transformer":
        return folders.both(place)
    return folders.trained(place, "recurrent", LSTM, folders.PAIRS)


@pytest.fixture(scope="module")
def both(place):
    return place / "both" if (place / "both").exists() else folders.both(place)


@pytest.fixture(scope="module")
def fluent(place):
    """Enough steps to say something about every line."""
    longer = folders.BOTH.replace("steps = 3\n", "steps = 60\nlr = 5e-3\nwarmup = 5\n")
    assert longer != folders.BOTH
    return folders.trained(place, "fluent", longer, folders.PAIRS)


@pytest.fixture(scope="module")
def speller(place):
    return folders.trained(place, "speller", SPELL, WORDS)


@pytest.fixture
def ask(monkeypatch, capsys):
    """Run a verb on bytes from a pipe: exit code, stdout, stderr."""

    def asked(words, given=b""):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given), isatty=lambda: False))
        capsys.readouterr()
        code = run([str(word) for word in words])
        return (code, *capsys.readouterr())

    return asked


LINES = [f"the {n} sons and {'more ' * (n % 5)}" for n in range(20)] + ["", "the 3 sons", "  "]
GIVEN = "".join(f"{line}\n" for line in LINES).encode()
FEW = ["--max-new-tokens", 12]


def test_lines_keep_their_order_whatever_the_batch(model, ask):
    pipe = mb.load(model)
    wanted = [pipe.translate(line, num_beams=3, max_new_tokens=12) if line.strip() else "" for line in LINES]
    for size in (1, 7, 64):
        code, out, _ = ask(["translate", model, "--num-beams", 3, "--batch-size", size, *FEW], GIVEN)
        assert code == 0
        assert out.split("\n")[:-1] == wanted
    assert wanted[-1] == wanted[-3] == ""


def test_json_holds_the_source_and_scored_hypotheses(model, ask):
    code, out, _ = ask(
        ["translate", model, "--n-best", 2, "--json", "--alignment", *FEW], b"the 3 sons\n\nthe 4 sons\n"
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


def test_a_greedy_text_has_the_score_a_search_would_give_it(model):
    pipe = mb.load(model)
    lines = ["the 3 sons", "the 44 sons and more"]
    greedy = pipe.translate(lines, n_best=1, num_beams=1, max_new_tokens=9, length_penalty=0.7)
    for line, (answer,) in zip(lines, greedy, strict=True):
        prompt = pipe.prompt(line)
        fed = torch.tensor([[*prompt.ids, *answer.ids[:-1]]])
        with torch.no_grad():
            shares = pipe.model(torch.tensor([prompt.source]), fed).log_softmax(-1)[0]
        wanted = sum(shares[place, token].item() for place, token in enumerate(answer.ids)) / len(answer.ids) ** 0.7
        assert answer.score == pytest.approx(wanted, abs=1e-4)
    for line, answers in zip(lines, pipe.translate(lines, n_best=3, max_new_tokens=9), strict=True):
        prompt = pipe.prompt(line)
        for answer in answers:
            fed = torch.tensor([[*prompt.ids, *answer.ids[:-1]]])
            with torch.no_grad():
                shares = pipe.model(torch.tensor([prompt.source]), fed).log_softmax(-1)[0]
            total = sum(shares[place, token].item() for place, token in enumerate(answer.ids))
            assert answer.score == pytest.approx(total / len(answer.ids), abs=1e-4)


def test_a_text_on_the_command_line_is_what_translate_gives(both, ask):
    code, out, err = ask(["translate", both, "the 5 sons", *FEW])
    assert (code, out) == (0, mb.load(both).translate("the 5 sons", max_new_tokens=12) + "\n")
    assert "Try: monoblock evaluate" in err


def test_bad_bytes_and_long_lines_are_one_clear_error(both, ask):
    code, _, err = ask(["translate", both], b"the 3 sons\nthe \xff sons\n")
    assert code == 1
    assert err.splitlines()[-1].startswith("error: standard input, line 2, byte 5: not UTF-8")
    long = ("the 3 sons went. " * 12).encode() + b"\n"
    code, out, err = ask(["translate", both, *FEW], b"the 3 sons\n" + long)
    assert (code, out) == (1, "")
    assert "line 2 has" in err
    assert "the model reads 48; shorten it, or split it with --long split" in err
    code, out, _ = ask(["translate", both, "--long", "split", "--json", *FEW], long)
    assert code == 0
    assert json.loads(out)["source"] == long.decode().rstrip("\n")
    _, alone, _ = ask(["translate", both, *FEW], b"the 3 sons went.\n")
    assert json.loads(out)["hypotheses"][0]["text"] == " ".join([alone.strip()] * 12), "sentence by sentence"


def test_what_makes_no_sense_is_refused(place, both, ask):
    speaker = folders.causal(place)
    assert ask(["translate", speaker, "x"])[0] == 2
    assert ask(["translate", both, "x", "--n-best", 2, "--temperature", 1])[0] == 2
    assert ask(["translate", both, "x", "--to", "tamil"])[0] == 1
    assert ask(["translate", place / "nothing", "x"])[0] == 1


# -- evaluate --------------------------------------------------------------------------------------------------------


def test_a_language_models_figures_are_those_of_one_plain_pass(place, ask):
    folder = place / "causal" if (place / "causal").exists() else folders.causal(place)
    text = "And the 9 sons of the king.\n" * 3
    (place / "short.txt").write_text(text)
    code, out, _ = ask(["evaluate", folder, place / "short.txt", "--split", "all", "--json"])
    assert code == 0
    told, pipe = json.loads(out), mb.load(folder)
    ids = torch.tensor([pipe.tokenizer.encode(text) + [pipe.tokenizer.eos_id] * (pipe.tokenizer.eos_id is not None)])
    assert ids.shape[1] <= 49, "one block"
    with torch.no_grad():
        loss = F.cross_entropy(pipe.model(ids[:, :-1])[0], ids[0, 1:]).item()
    assert told["loss"] == pytest.approx(loss, rel=1e-5)
    assert told["perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert told["bits_per_byte"] == pytest.approx(loss / 0.693147 * ids.shape[1] / len(text.encode()), rel=1e-4)


def test_translations_are_measured_and_bounds_decide_the_exit_code(model, place, ask):
    sacrebleu = pytest.importorskip("sacrebleu")
    corpus = place / "test.tsv"
    corpus.write_text(folders.PAIRS, encoding="utf-8")
    words = ["evaluate", model, corpus, "--split", "all", "--limit", 6, *FEW]
    code, out, _ = ask([*words, "--json", "--samples", 2])
    assert code == 0
    told = json.loads(out)
    pairs = [line.split("\t") for line in folders.PAIRS.splitlines()[:6]]
    texts = mb.load(model).translate([source for source, _ in pairs], max_new_tokens=12)
    assert told["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, [[target for _, target in pairs]]).score)
    assert {"bleu_tokenized", "chrf", "signature", "accuracy"} < set(told)
    assert told["samples"][1] == {"source": pairs[1][0], "reference": pairs[1][1], "hypothesis": texts[1]}
    assert ask([*words, "--at-least", "bleu=0", "--at-most", "chrf=100"])[0] == 0
    code, _, err = ask([*words, "--at-least", "bleu=101"])
    assert code == 3
    assert "not reached: bleu" in err
    assert ask([*words, "--at-least", "blue=1"])[0] == 2
    assert ask([*words, "--at-least", "bleu"])[0] == 2


def test_words_are_measured_by_accuracy_and_rescored(speller, place, ask):
    (place / "three").mkdir()
    rows = WORDS.splitlines(keepends=True)
    for name, part in (("train", rows[:36]), ("valid", rows[36:42]), ("test", [*rows[42:], "zzz\tzz\t1\nzzz\tz\t2\n"])):
        (place / "three" / f"{name}.tsv").write_text("".join(part))
    words = ["evaluate", speller, place / "three", "--n-best", 3, *FEW]
    code, out, err = ask([*words, "--json", "--rescore", "--save-words", place / "words.json"])
    assert code == 0
    told = json.loads(out)
    assert told["sources"] == 7, "zzz once"
    assert told["split"] == "test"
    assert set(told) >= {"accuracy", "top_k", "k", "cer", "rescored"}
    assert told["rescored"]["gain"] == pytest.approx(told["rescored"]["accuracy"] - told["accuracy"])
    assert "any target attested" in err
    counts = json.loads((place / "words.json").read_text())["counts"]
    assert counts["hea"] == 1
    assert sum(counts.values()) == sum(int(row.split("\t")[2]) for row in rows[:36])
    assert ask(["translate", speller, "aeh", "--words", place / "words.json", *FEW])[0] == 0


def test_the_model_card_tells_what_was_measured(both, place, ask):
    pytest.importorskip("sacrebleu")
    first = (both / "README.md").read_text()
    assert "val_bleu" in first
    config = json.loads((both / "generation_config.json").read_text())
    assert (config["num_beams"], config["length_penalty"], config["do_sample"]) == (4, 1.0, False)
    assert config["decoder_start_token_id"] == mb.load(both).tokenizer.bos_id
    corpus = place / "card.tsv"
    corpus.write_text(folders.PAIRS, encoding="utf-8")
    for _ in range(2):
        assert ask(["evaluate", both, corpus, "--split", "valid", "--card", *FEW])[0] == 0
    card = (both / "README.md").read_text()
    assert card.startswith(first)
    assert card.count(f"## Measured on {corpus}, split valid") == 1
    assert "nrefs:1|case:mixed" in card


# -- back-translation ------------------------------------------------------------------------------------------------


def test_back_translation_writes_pairs_and_leaves_out_what_cannot_be_read(fluent, place, ask):
    mono = place / "mono.txt"
    mono.write_text("the 3 sons\n\n" + "the sons " * 60 + "\nthe 4 sons\n")
    words = ["backtranslate", fluent, mono, "--out"]
    code, out, _ = ask([*words, place / "beam.tsv", "--json"])
    assert code == 0
    assert json.loads(out) | {"file": ""} == {"file": "", "pairs": 2, "left_out": 2, "method": "beam", "noise": []}
    made = [line.split("\t") for line in (place / "beam.tsv").read_text().splitlines()]
    assert [target for _, target in made] == ["the 3 sons", "the 4 sons"]
    pipe = mb.load(fluent)
    assert [source for source, _ in made] == [" ".join(pipe.translate(t, num_beams=5).split()) for _, t in made]
    assert ask([*words, place / "tagged.tsv", "--tag"])[0] == 0
    assert (place / "tagged.tsv").read_text() == "".join(f"<bt> {s}\t{t}\n" for s, t in made)
    assert ask([*words, place / "noised.tsv", "--method", "noised", "--noise", "blank,drop"])[0] == 0
    code, _, err = ask([*words, place / "beam.tsv"])
    assert code == 2
    assert "is there already" in err
    assert ask([*words, place / "x.tsv", "--method", "beem"])[0] == 2
    assert ask([*words, place / "x.tsv", "--method", "sample", "--num-beams", 3])[0] == 2


def test_lines_are_drawn_each_by_its_own_seed_whatever_the_batch(fluent, place, ask):
    mono = place / "same.txt"
    mono.write_text("the 3 sons\n" * 5)
    for size in (1, 3, 64):
        words = ["backtranslate", fluent, mono, "--out", place / f"drawn-{size}.tsv", "--method", "restricted"]
        assert ask([*words, "--batch-size", size, "--seed", 4])[0] == 0
    one, three, many = ((place / f"drawn-{size}.tsv").read_text() for size in (1, 3, 64))
    assert one == three == many
    assert len(set(one.splitlines())) > 1


def test_the_arms_of_a_comparison_share_budget_tokenizer_and_pairs(place, ask):
    pytest.importorskip("sacrebleu")
    corpus = place / "few.tsv"
    corpus.write_text(folders.PAIRS, encoding="utf-8")
    recipe = place / "arms.toml"
    recipe.write_text(folders.BOTH.format(corpus) + "[generate]\nmax_new_tokens = 8\nmeasure = 2\n", encoding="utf-8")
    words = ["compare", "backtranslation", f"recipe={recipe}", "pairs=30", "monolingual=20", "seeds=1,2", "limit=3"]
    words += [
        "arms=none,beam,tagged-noised",
        "tokenizer.vocab=280",
        "train.steps=40",
        "train.lr=5e-3",
        "train.warmup=5",
        "--out",
        place / "arms",
    ]
    code, out, _ = ask([*words, "--json"])
    assert code == 0
    told = json.loads(out)
    assert [row["arm"] for row in told["rows"]] == ["none", "beam", "tagged-noised"]
    assert all(len(row["values"]) == 2 for row in told["rows"])
    assert (told["about"]["pairs"], told["about"]["target_sentences"], told["about"]["steps"]) == (30, 20, 40)
    assert {path.name for path in (place / "arms").iterdir()} >= {"result.json", "seed-1", "seed-2", "tokenizer"}
    seed = place / "arms" / "seed-1"
    beam, dressed = ((seed / f"{arm}.tsv").read_text().splitlines() for arm in ("beam", "tagged-noised"))
    assert len(beam) == len(dressed) == 20
    assert all(line.startswith("<bt> ") for line in dressed)
    prints = {json.loads((seed / arm / "config.json").read_text())["tokenizer"] for arm in ("none", "beam", "backward")}
    assert len(prints) == 1
    before = (seed / "beam" / "model.safetensors").stat().st_mtime_ns
    assert ask([*words])[0] == 0, "what is there is taken"
    assert (seed / "beam" / "model.safetensors").stat().st_mtime_ns == before
    none = ["--out", str(place / "none")]
    assert ask(["compare", "backtranslation", "arms=beam,bean", *none])[0] == 2
    assert ask(["compare", "backtranslations", *none])[0] == 2
    assert ask(["compare", "backtranslation", "sead=3", *none])[0] == 2
    assert not (place / "none").exists()


def test_the_recurrent_arm_has_about_as_many_weights(place, ask):
    pytest.importorskip("sacrebleu")
    corpus = place / "both.tsv"
    corpus.write_text(folders.PAIRS, encoding="utf-8")
    recipe = place / "recurrence.toml"
    recipe.write_text(folders.BOTH.format(corpus) + "[generate]\nmax_new_tokens = 8\nmeasure = 2\n", encoding="utf-8")
    words = ["compare", "recurrence", f"recipe={recipe}", "limit=3", "train.steps=2", "--out", place / "lstm-arm"]
    code, out, _ = ask([*words, "--json"])
    assert code == 0
    sizes = [row["parameters"] for row in json.loads(out)["rows"]]
    assert 0.9 < sizes[1] / sizes[0] < 1.1


def test_an_lstm_that_speaks_goes_on_like_any_other(place, ask):
    recipe = folders.CAUSAL.replace('family = "gpt"', 'family = "lstm"').replace("heads = 2\n", "")
    pipe = mb.load(folders.trained(place, "speaking", recipe, folders.BOOK))
    ids = torch.tensor([pipe.tokenizer.encode("And the")])
    with torch.no_grad():
        for _ in range(7):
            ids = torch.cat((ids, pipe.model(ids)[:, -1:].argmax(-1)), 1)
    said = pipe.generate("And the", max_new_tokens=7, temperature=0)
    assert "And the" + said == pipe.tokenizer.decode(ids[0].tolist())
    assert "".join(pipe.stream("And the", max_new_tokens=7, temperature=0)) == said
    assert ask(["generate", place / "speaking", "And the", "--max-new-tokens", 3])[0] == 0
