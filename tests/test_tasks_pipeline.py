"""mb.load: model, tokenizer and defaults together; text in, text out."""

import json
import shutil
import warnings

import decoding_folders as folders
import pytest
import torch

import monoblock as mb

PROMPT = "And the 7 sons"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def speaker(place):
    return mb.load(folders.causal(place))


@pytest.fixture(scope="module")
def translator(place):
    return mb.load(folders.both(place))


@pytest.fixture(scope="module", params=["gpt2", "t5"])
def stranger(place, request):
    pytest.importorskip("transformers")
    return folders.published(place, request.param)


# -- continuing -------------------------------------------------------------------------------------------------------


def test_a_text_goes_on_as_the_model_says(speaker):
    ids = speaker.tokenizer.encode(PROMPT)
    wanted = speaker.model.generate(torch.tensor([ids]), max_new_tokens=20)[0].tolist()
    got = speaker.generate(PROMPT, max_new_tokens=20, temperature=0)
    assert PROMPT + got == speaker.tokenizer.decode(wanted)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "seed": 4}, {"seed": 3, "stop": "e"}])
def test_a_stream_put_together_is_what_generate_gives(speaker, options):
    parts = list(speaker.stream(PROMPT, max_new_tokens=30, **options))
    assert len(parts) > 1 or "stop" in options
    assert "".join(parts) == speaker.generate(PROMPT, max_new_tokens=30, **options)


def test_the_folders_defaults_hold_unless_something_else_is_said(speaker):
    torch.manual_seed(1)
    chosen = speaker.settings({})
    assert (chosen.temperature, chosen.top_p, chosen.max_new_tokens) == (0.8, 0.95, 120)
    assert speaker.settings({"temperature": 0, "max_new_tokens": 5}).temperature == 0
    assert speaker.settings({"num_beams": 3}).temperature == 0, "beams were asked for, a temperature was not"
    with pytest.raises(mb.InputError, match="temperature=0 or num_beams=1"):
        speaker.settings({"num_beams": 3, "temperature": 0.5})


def test_several_prompts_and_several_texts(speaker):
    said = speaker.generate([PROMPT, "Blessed"], max_new_tokens=9, temperature=0)
    assert said == [speaker.generate(text, max_new_tokens=9, temperature=0) for text in (PROMPT, "Blessed")]
    three = speaker.generate(PROMPT, max_new_tokens=9, temperature=1.5, seed=2, num_return_sequences=3)
    assert len(three) == 3
    assert three[0] == speaker.generate(PROMPT, max_new_tokens=9, temperature=1.5, seed=2)


def test_an_answer_says_how_it_ended(speaker):
    whole = speaker.generate(PROMPT, max_new_tokens=20, temperature=0)
    stop = whole[5:8]
    (answer,), (short,) = (
        speaker.answers([PROMPT], max_new_tokens=20, temperature=0, **more)[0] for more in ({}, {"stop": stop})
    )
    assert (answer.tokens, answer.finished, answer.text) == (20, "length", whole)
    assert (short.finished, short.text) == ("stop", whole[: whole.index(stop)])
    assert short.tokens < 20


def test_without_a_prompt_a_text_begins_where_texts_begin(speaker, place):
    with pytest.raises(mb.InputError, match="no start token"):
        speaker.generate("", max_new_tokens=3)
    gpt = mb.load(folders.published(place, "gpt2"))
    assert gpt.prompt("").ids == (gpt.tokenizer.bos_id,)


def test_bad_words_of_a_call_are_one_line(speaker):
    for call, said in [
        (lambda: speaker.generate(PROMPT, tempereture=1), "did you mean 'temperature'"),
        (lambda: speaker.generate("king " * 60), "leaves no room"),
        (lambda: speaker.stream(PROMPT, num_beams=2), "call generate"),
        (lambda: speaker.stream(PROMPT, temperature=-1), "cannot be"),
        (lambda: speaker.translate("x"), "call generate"),
        (lambda: speaker.chat([{"role": "user", "content": "x"}]), "no chat template"),
        (lambda: mb.load("nowhere"), "there is no nowhere"),
    ]:
        with pytest.raises(mb.MonoblockError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value)


# -- translating ------------------------------------------------------------------------------------------------------


def test_a_source_is_framed_as_in_training(translator):
    tokenizer = translator.tokenizer
    prompt = translator.prompt("the 7 sons")
    assert prompt.ids == (tokenizer.bos_id,)
    assert prompt.source == (*tokenizer.encode("the 7 sons"), tokenizer.eos_id)


def test_many_sources_keep_their_order_whatever_the_batch(translator):
    texts = ["the 7 sons", "", "the 1 sons of the king went up", "sons", "  ", "the 12 sons", "king"]
    one_by_one = [translator.translate(text, max_new_tokens=9) for text in texts]
    assert one_by_one[1] == one_by_one[4] == ""
    for batch in (1, 2, 64):
        assert translator.translate(texts, max_new_tokens=9, batch=batch) == one_by_one
    assert len(set(one_by_one)) > 2


def test_the_n_best_come_with_scores_best_first(translator):
    best = translator.translate("the 7 sons", n_best=3, max_new_tokens=9)
    assert len({answer.text for answer in best}) > 1
    assert [answer.score for answer in best] == sorted((answer.score for answer in best), reverse=True)
    assert best[0].text == translator.translate("the 7 sons", max_new_tokens=9), "four beams are the default here"
    assert len(translator.translate(["the 7 sons", "king"], n_best=2, max_new_tokens=9)[1]) == 2


# -- published folders ------------------------------------------------------------------------------------------------


def theirs(folder, text, **options):
    """What transformers says from the same folder."""
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        kind = transformers.GPT2LMHeadModel if folder.name == "gpt2" else transformers.T5ForConditionalGeneration
        model = kind.from_pretrained(folder).eval()
        given = tokenizer(text, return_tensors="pt")["input_ids"]
        if folder.name == "gpt2":
            given = given[:, :-1]  # the end token that this tokenizer adds
        out = model.generate(given, max_new_tokens=12, **options)[0]
    return tokenizer.decode(out[given.shape[1] if folder.name == "gpt2" else 0 :], skip_special_tokens=True)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_a_hugging_face_folder_says_what_it_says_in_transformers(stranger, options):
    pipe = mb.load(stranger)
    assert pipe.generate(PROMPT, max_new_tokens=12, **options) == theirs(stranger, PROMPT, **options)


def test_a_conversation_follows_the_template(place):
    pytest.importorskip("transformers")
    pipe = mb.load(folders.published(place, "gpt2"))
    messages = [{"role": "user", "content": "the king <s>"}]
    text = "<s>user: the king <s></s><s>assistant:"
    ids = pipe.tokenizer.encode(text, allow_specials=True)
    assert pipe.turn(messages).ids == tuple(ids)
    new = pipe.model.generate(torch.tensor([ids]), max_new_tokens=9, eos_token_id=pipe.tokenizer.eos_id)[0, len(ids) :]
    assert pipe.chat(messages, max_new_tokens=9) == pipe.tokenizer.decode(new.tolist())
    assert "".join(pipe.chat_stream(messages, max_new_tokens=9)) == pipe.chat(messages, max_new_tokens=9)


def test_a_gguf_file_says_what_its_folder_says(tmp_path):
    pytest.importorskip("gguf")
    from monoblock.interop.gguf import save_gguf

    data, named = mb.Tokenizer.train("bpe", [folders.BOOK], 290).content()
    data["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = mb.Tokenizer.from_parts(data, named, "made here")  # cut as GPT-2's, which GGUF has a name for
    torch.manual_seed(2)
    config = mb.llama(vocab=tokenizer.vocab_size, width=24, depth=2, heads=2, context=64, hidden=32)
    model = mb.Transformer(config).eval()
    save_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer, kind="f32")
    pipe = mb.load(tmp_path / "model.gguf")
    ids = pipe.prompt(PROMPT).ids
    new = model.generate(torch.tensor([ids]), max_new_tokens=9, eos_token_id=tokenizer.eos_id)[0].tolist()
    assert PROMPT + pipe.generate(PROMPT, max_new_tokens=9) == tokenizer.decode(new)


# -- generation_config.json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"num_beams": 4, "length_penalty": 0.6, "early_stopping": True}, {"num_beams": 4, "early_stopping": True}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": (5, 6)}),
        ({"max_new_tokens": 7, "bad_words_ids": [[3, 4]]}, {"max_new_tokens": 7, "bad_words_ids": ((3, 4),)}),
    ],
)
def test_the_words_of_a_generation_config_are_read(place, said, wanted):
    pytest.importorskip("transformers")
    folder = folders.published(place, "gpt2")
    (folder / "generation_config.json").write_text(json.dumps(said))
    chosen = mb.load(folder).settings({})
    assert {name: getattr(chosen, name) for name in wanted} == wanted


def test_words_that_mean_nothing_here_are_ignored_by_name_and_wrong_ones_refused(place):
    pytest.importorskip("transformers")
    folder = folders.published(place, "gpt2")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"cache_implementation": "static", "temperature": 0.5, "max_length": 99}))
    assert mb.load(folder).defaults.ignored == ("cache_implementation", "max_length")
    for wrong in ({"top_p": 7}, {"num_beams": "many"}, {"eos_token_id": -3}, {"decoder_start_token_id": "x"}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(mb.FileError, match=r"generation_config\.json|no token"):
            mb.load(folder)


def test_a_tokenizer_that_is_not_the_models_is_refused(place):
    pytest.importorskip("transformers")
    folder = folders.published(place, "gpt2")
    mb.Tokenizer.train("bpe", [folders.BOOK], 300).save_pretrained(folder)
    with pytest.raises(mb.FileError, match="not the model's"):
        mb.load(folder)


def test_a_run_leaves_the_defaults_of_its_task(place, speaker, translator):
    here = {name: json.loads((place / name / "generation_config.json").read_text()) for name in ("causal", "both")}
    assert here["causal"]["do_sample"] is True
    assert here["both"]["num_beams"] == 4
    assert here["both"]["decoder_start_token_id"] == here["both"]["bos_token_id"] is not None
    assert "temperature" not in here["both"]


def test_a_folder_written_before_sampling_was_said_still_samples(place, speaker, tmp_path):
    shutil.copytree(place / "causal", tmp_path / "old")
    folders.rewrite(tmp_path / "old", "generation_config.json", lambda data: data.pop("do_sample"))
    assert mb.load(tmp_path / "old").settings({}).temperature == 0.8
