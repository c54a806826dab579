"""mb.load: a model with its tokenizer and defaults generates, chats and translates."""

import json
import shutil
import warnings
from dataclasses import replace

import model_folders
import pytest
import torch

import monoblock as mb
from monoblock.errors import InputError
from monoblock.tasks.loaded_model import GenerationDefaults

PROMPT = "And the 7 sons"


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def causal_pipe(parent):
    return mb.load(model_folders.causal_folder(parent))


@pytest.fixture(scope="module")
def seq2seq_pipe(parent):
    return mb.load(model_folders.seq2seq_folder(parent))


@pytest.fixture(scope="module", params=["gpt2", "t5"])
def hf_folder(parent, request):
    pytest.importorskip("transformers")
    return model_folders.hf_folder(parent, request.param)


# -- generation -------------------------------------------------------------------------------------------------------


def test_generate_continues_a_prompt_as_the_model_does(causal_pipe):
    ids = causal_pipe.tokenizer.encode(PROMPT)
    expected = causal_pipe.model.generate(torch.tensor([ids]), max_new_tokens=20)[0].tolist()
    text = causal_pipe.generate(PROMPT, max_new_tokens=20, temperature=0)
    assert PROMPT + text == causal_pipe.tokenizer.decode(expected)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "seed": 4}, {"seed": 3, "stop": "e"}])
def test_a_stream_concatenates_to_what_generate_returns(causal_pipe, options):
    parts = list(causal_pipe.stream(PROMPT, max_new_tokens=30, **options))
    assert len(parts) > 1 or "stop" in options
    assert "".join(parts) == causal_pipe.generate(PROMPT, max_new_tokens=30, **options)


def test_options_override_the_defaults_of_the_folder(causal_pipe):
    torch.manual_seed(1)
    settings = causal_pipe.resolve_settings({})
    assert (settings.temperature, settings.top_p, settings.max_new_tokens) == (0.8, 0.95, 47)
    assert causal_pipe.resolve_settings({"temperature": 0, "max_new_tokens": 5}).temperature == 0
    assert causal_pipe.resolve_settings({"num_beams": 3}).temperature == 0, (
        "the option num_beams overrides the default temperature"
    )
    with pytest.raises(mb.InputError, match="temperature=0 or num_beams=1"):
        causal_pipe.resolve_settings({"num_beams": 3, "temperature": 0.5})


def test_several_prompts_and_several_sequences_each(causal_pipe):
    texts = causal_pipe.generate([PROMPT, "Blessed"], max_new_tokens=9, temperature=0)
    assert texts == [causal_pipe.generate(text, max_new_tokens=9, temperature=0) for text in (PROMPT, "Blessed")]
    three = causal_pipe.generate(PROMPT, max_new_tokens=9, temperature=1.5, seed=2, num_return_sequences=3)
    assert len(three) == 3
    assert three[0] == causal_pipe.generate(PROMPT, max_new_tokens=9, temperature=1.5, seed=2)


def test_a_hypothesis_has_its_finish_reason(causal_pipe):
    options = {"max_new_tokens": 20, "temperature": 0}
    text = causal_pipe.generate(PROMPT, **options)
    stop = text[5:8]
    ((full,),) = causal_pipe.generate_hypotheses([PROMPT], **options)
    ((stopped,),) = causal_pipe.generate_hypotheses([PROMPT], stop=stop, **options)
    assert (full.num_tokens, full.finish_reason, full.text) == (20, "length", text)
    assert (stopped.finish_reason, stopped.text) == ("stop", text[: text.index(stop)])
    assert stopped.num_tokens < 20


def test_an_empty_prompt_is_the_start_token(causal_pipe, parent):
    with pytest.raises(mb.InputError, match="no start token"):
        causal_pipe.generate("", max_new_tokens=3)
    gpt = mb.load(model_folders.hf_folder(parent, "gpt2"))
    assert gpt.encode_prompt("").ids == (gpt.tokenizer.bos_id,)


def test_errors_are_one_line(causal_pipe):
    for call, message in [
        (lambda: causal_pipe.generate(PROMPT, tempereture=1), "did you mean 'temperature'"),
        (lambda: causal_pipe.generate("king " * 60), "leaves no room"),
        (lambda: causal_pipe.stream(PROMPT, num_beams=2), "call generate"),
        (lambda: causal_pipe.stream(PROMPT, temperature=-1), "temperature=-1 is not valid"),
        (lambda: causal_pipe.translate("x"), "call generate"),
        (lambda: causal_pipe.chat([{"role": "user", "content": "x"}]), "no chat template"),
        (lambda: mb.load("nowhere"), "there is no folder or file nowhere"),
    ]:
        with pytest.raises(mb.MonoblockError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


# -- translation ------------------------------------------------------------------------------------------------------


def test_a_source_is_encoded_as_in_training(seq2seq_pipe):
    tokenizer = seq2seq_pipe.tokenizer
    prompt = seq2seq_pipe.encode_prompt("the 7 sons")
    assert prompt.ids == (tokenizer.bos_id,)
    assert prompt.source == (*tokenizer.encode("the 7 sons"), tokenizer.eos_id)


def test_translations_keep_the_order_of_their_sources_at_any_batch_size(seq2seq_pipe):
    texts = ["the 7 sons", "", "the 1 sons of the king went up", "sons", "  ", "the 12 sons", "king"]
    one_by_one = [seq2seq_pipe.translate(text, max_new_tokens=9) for text in texts]
    assert one_by_one[1] == one_by_one[4] == ""
    for batch in (1, 2, 64):
        assert seq2seq_pipe.translate(texts, max_new_tokens=9, batch=batch) == one_by_one
    assert len(set(one_by_one)) > 2


def test_the_n_best_hypotheses_are_sorted_by_score(seq2seq_pipe):
    best = seq2seq_pipe.translate("the 7 sons", n_best=3, max_new_tokens=9)
    assert len({hypothesis.text for hypothesis in best}) > 1
    assert [hypothesis.score for hypothesis in best] == sorted((hypothesis.score for hypothesis in best), reverse=True)
    assert best[0].text == seq2seq_pipe.translate("the 7 sons", max_new_tokens=9), "four beams are the default here"
    assert len(seq2seq_pipe.translate(["the 7 sons", "king"], n_best=2, max_new_tokens=9)[1]) == 2


# -- published folders ------------------------------------------------------------------------------------------------


def generate_with_transformers(folder, text, **options):
    """The text that transformers generates from the same folder."""
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        kind = transformers.GPT2LMHeadModel if folder.name == "gpt2" else transformers.T5ForConditionalGeneration
        model = kind.from_pretrained(folder).eval()
        input_ids = tokenizer(text, return_tensors="pt")["input_ids"]
        if folder.name == "gpt2":
            input_ids = input_ids[:, :-1]  # the end token that this tokenizer adds
        out = model.generate(input_ids, max_new_tokens=12, **options)[0]
    return tokenizer.decode(out[input_ids.shape[1] if folder.name == "gpt2" else 0 :], skip_special_tokens=True)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_a_hugging_face_folder_generates_what_transformers_generates(hf_folder, options):
    pipe = mb.load(hf_folder)
    assert pipe.generate(PROMPT, max_new_tokens=12, **options) == generate_with_transformers(
        hf_folder, PROMPT, **options
    )


def test_a_conversation_is_encoded_by_the_chat_template(parent):
    pytest.importorskip("transformers")
    pipe = mb.load(model_folders.hf_folder(parent, "gpt2"))
    messages = [{"role": "user", "content": "the king <s>"}]
    text = "<s>user: the king <s></s><s>assistant:"
    ids = pipe.tokenizer.encode(text, allow_specials=True)
    assert pipe.encode_chat(messages).ids == tuple(ids)
    new = pipe.model.generate(torch.tensor([ids]), max_new_tokens=9, eos_token_id=pipe.tokenizer.eos_id)[0, len(ids) :]
    assert pipe.chat(messages, max_new_tokens=9) == pipe.tokenizer.decode(new.tolist())
    assert "".join(pipe.chat_stream(messages, max_new_tokens=9)) == pipe.chat(messages, max_new_tokens=9)


def test_a_gguf_file_generates_what_its_model_generates(tmp_path):
    pytest.importorskip("gguf")
    from monoblock.interop.gguf.writer import save_gguf

    data, config = mb.Tokenizer.train("bpe", [model_folders.TEXT], 290).content()
    data["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = mb.Tokenizer.from_content(data, config, "test")  # pre-tokenized as GPT-2, which GGUF has a name for
    torch.manual_seed(2)
    config = mb.llama(vocab=tokenizer.vocab_size, width=24, depth=2, heads=2, context=64, hidden=32)
    model = mb.Transformer(config).eval()
    save_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer, kind="f32")
    pipe = mb.load(tmp_path / "model.gguf")
    ids = pipe.encode_prompt(PROMPT).ids
    new = model.generate(torch.tensor([ids]), max_new_tokens=9, eos_token_id=tokenizer.eos_id)[0].tolist()
    assert PROMPT + pipe.generate(PROMPT, max_new_tokens=9) == tokenizer.decode(new)


# -- generation_config.json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"num_beams": 4, "length_penalty": 0.6, "early_stopping": True}, {"num_beams": 4, "early_stopping": True}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": (5, 6)}),
        ({"max_new_tokens": 7, "bad_words_ids": [[3, 4]]}, {"max_new_tokens": 7, "bad_words_ids": ((3, 4),)}),
    ],
)
def test_the_fields_of_generation_config_json_are_read(parent, fields, expected):
    pytest.importorskip("transformers")
    folder = model_folders.hf_folder(parent, "gpt2")
    (folder / "generation_config.json").write_text(json.dumps(fields))
    settings = mb.load(folder).resolve_settings({})
    assert {name: getattr(settings, name) for name in expected} == expected


def test_unknown_fields_are_reported_and_wrong_values_refused(parent):
    pytest.importorskip("transformers")
    folder = model_folders.hf_folder(parent, "gpt2")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"cache_implementation": "static", "temperature": 0.5, "max_length": 99}))
    assert mb.load(folder).defaults.ignored_fields == ()  # the text does not depend on them
    neutral = {"penalty_alpha": 0.0, "guidance_scale": None, "token_healing": False}
    path.write_text(json.dumps(neutral | {"penalty_alpha": 0.6, "sequence_bias": [[[3], -1.0]]}))
    assert mb.load(folder).defaults.ignored_fields == ("penalty_alpha", "sequence_bias")
    for wrong in ({"top_p": 7}, {"num_beams": "many"}, {"eos_token_id": -3}, {"decoder_start_token_id": "x"}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(mb.FileError, match=r"generation_config\.json|not a token id"):
            mb.load(folder)


def test_the_maximum_length_of_an_encoder_decoder_is_read(parent):
    pytest.importorskip("transformers")
    folder = model_folders.hf_folder(parent, "t5")
    (folder / "generation_config.json").write_text(json.dumps({"max_length": 9, "decoder_start_token_id": 0}))
    assert mb.load(folder).resolve_settings({}).max_new_tokens == 8


def test_a_tokenizer_of_another_model_is_refused(parent):
    pytest.importorskip("transformers")
    folder = model_folders.hf_folder(parent, "gpt2")
    mb.Tokenizer.train("bpe", [model_folders.TEXT], 300).save_pretrained(folder)
    with pytest.raises(mb.FileError, match="the model's own folder"):
        mb.load(folder)


@pytest.fixture
def published_gpt2(tmp_path):
    """A GPT-2 folder with a vocabulary of 4,096 tokens, and no tokenizer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32}
    config = transformers.GPT2Config(vocab_size=4096, bos_token_id=2, eos_token_id=4000, pad_token_id=3, **sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_tokenizer_far_too_small_for_a_published_model_is_refused(published_gpt2):
    mb.Tokenizer.train("wordpiece", [model_folders.TEXT], 73).save_pretrained(published_gpt2)
    with pytest.raises(mb.FileError, match=r"belongs to another model.*--force"):
        mb.load(published_gpt2)
    assert mb.load(published_gpt2, force=True).tokenizer.vocab_size == 73


def test_what_looks_wrong_with_the_tokenizer_of_a_published_model_is_said(published_gpt2):
    text = " ".join(f"{first}{second}" for first in range(400) for second in range(9))
    mb.Tokenizer.train("word", [text], 3000).save_pretrained(published_gpt2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        mb.load(published_gpt2)
    texts = " ".join(str(warning.message) for warning in found)
    assert "eos_token_id 4000, but the tokenizer ends at" in texts
    assert "a gpt2 model usually has a bpe tokenizer, but this one is word" in texts
    assert "plain English into unknown tokens" in texts


def test_a_run_writes_the_defaults_of_its_objective(parent, causal_pipe, seq2seq_pipe):
    defaults = {name: json.loads((parent / name / "generation_config.json").read_text()) for name in ("causal", "both")}
    assert defaults["causal"]["do_sample"] is True
    assert defaults["both"]["num_beams"] == 4
    assert defaults["both"]["decoder_start_token_id"] == defaults["both"]["bos_token_id"] is not None
    assert "temperature" not in defaults["both"]


def test_a_run_folder_without_do_sample_still_samples(parent, causal_pipe, tmp_path):
    shutil.copytree(parent / "causal", tmp_path / "run")
    model_folders.edit_json(tmp_path / "run", "generation_config.json", lambda data: data.pop("do_sample"))
    assert mb.load(tmp_path / "run").resolve_settings({}).temperature == 0.8


# -- inputs and options of users --------------------------------------------------------------------------------------


def test_the_representation_of_a_pipeline_is_one_line(causal_pipe):
    weights = sum(weight.numel() for weight in causal_pipe.model.parameters())
    assert repr(causal_pipe).startswith(f"Pipeline(decoder-only, {weights:,} parameters, Tokenizer(")
    assert "\n" not in repr(causal_pipe)


def test_empty_lists_give_empty_results(causal_pipe, seq2seq_pipe):
    assert causal_pipe.generate([]) == []
    assert seq2seq_pipe.translate([]) == []
    assert causal_pipe.embed([]).shape == (0, causal_pipe.model.config.width)


@pytest.mark.parametrize("method", ["generate", "translate", "classify", "tag", "fill", "embed"])
def test_an_input_that_is_no_text_is_one_line(causal_pipe, method):
    for wrong in (None, 3, [None], ["a", 3]):
        with pytest.raises(InputError, match=f"{method} takes"):
            getattr(causal_pipe, method)(wrong)


def test_a_sampling_option_that_a_greedy_folder_would_ignore_is_refused(causal_pipe):
    greedy = replace(causal_pipe, defaults=GenerationDefaults({"temperature": 0.0}))
    with pytest.raises(InputError, match="write temperature=1 too"):
        greedy.generate("In the", top_k=5)
    assert isinstance(greedy.generate("In the", top_k=5, temperature=1, max_new_tokens=2), str)


def test_token_scores_and_truncation_of_a_pipeline(causal_pipe):
    context = causal_pipe.model.config.context
    text = "In the beginning " * context
    with pytest.raises(InputError, match="leaves no room"):
        causal_pipe.generate(text, max_new_tokens=3)
    options = {"max_new_tokens": 3, "temperature": 0}
    (hypothesis,) = causal_pipe.generate_hypotheses([text], truncation="left", return_scores=True, **options)[0]
    ids = torch.tensor([[*causal_pipe.encode_prompt(text).ids[3 - context :], *hypothesis.ids]])
    with torch.no_grad():
        log_probs = causal_pipe.model(ids)[0].log_softmax(-1)
    wanted = [float(log_probs[context - 4 + n, token]) for n, token in enumerate(hypothesis.ids)]
    torch.testing.assert_close(list(hypothesis.token_scores), wanted, atol=1e-4, rtol=0)
    assert "".join(causal_pipe.stream(text, truncation="left", **options)) == hypothesis.text


def test_a_decoder_embeds_a_text_as_its_last_hidden_state(parent):
    hf_folder = model_folders.hf_folder(parent, "gpt2")
    pipe = mb.load(hf_folder)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModel.from_pretrained(hf_folder).eval()
    texts = ["In the beginning", "God"]
    for text, last, mean in zip(texts, pipe.embed(texts), pipe.embed(texts, pooling="mean"), strict=True):
        with torch.no_grad():
            hidden = theirs(torch.tensor([pipe.tokenizer.encode(text, add_specials=True)])).last_hidden_state[0]
        torch.testing.assert_close(last, torch.nn.functional.normalize(hidden[-1], dim=0), atol=1e-5, rtol=0)
        torch.testing.assert_close(mean, torch.nn.functional.normalize(hidden.mean(0), dim=0), atol=1e-5, rtol=0)
