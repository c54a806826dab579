"""What OpenAI's own client sees: a table of calls that are answered, and one of calls that are refused."""

import inspect
import json
import math

import openai
import pytest
from serving_support import KEY, running_server, tiny_app, tiny_pipeline

from monoblock.serving.requests import IGNORED, REFUSED

PROMPT = "In the beginning"
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "a"}}
OBJECT = {
    "type": "object",
    "properties": {"a": {"enum": ["yes", "no"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": OBJECT}}
SILENT = {"role": "assistant", "content": None, "tool_calls": [TOOL]}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
SAMPLED = {"temperature": 1, "seed": 1}
STREAM_WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
VALUES = {"metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True}
DEFAULTS = {
    "completions": {"prompt": PROMPT, "max_tokens": 6, "temperature": 0},
    "chat": {"messages": HELLO, "max_tokens": 6, "temperature": 0},
    "responses": {"input": "Hello", "max_output_tokens": 16, "temperature": 0},
    "embeddings": {"input": PROMPT},
}


@pytest.fixture(scope="module")
def gate():
    return tiny_app()


@pytest.fixture(scope="module")
def client(gate):
    with running_server(gate) as (_, address):
        yield openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def call(client):
    """Return a function of a route and options that asks it; options the client does not know go into the body."""
    routes = {
        "completions": client.completions.create,
        "chat": client.chat.completions.create,
        "responses": client.responses.create,
        "embeddings": client.embeddings.create,
    }

    def ask(route, **options):
        if route == "models":
            return client.models.retrieve(options["model"])
        known, own = inspect.signature(routes[route]).parameters, {}
        for name, value in {"model": "tiny", **DEFAULTS[route], **options}.items():
            if value is not None:
                (own if name in known else own.setdefault("extra_body", {}))[name] = value
        answer = routes[route](**own)
        return list(answer) if options.get("stream") else answer

    return ask


def text_of(answer):
    """Return the text of an answer, or of the events of a stream: of choice 0, if there are several."""
    if isinstance(answer, list):
        if hasattr(answer[0], "type"):
            return "".join(event.delta for event in answer if event.type == "response.output_text.delta")
        first = [choice for event in answer for choice in event.choices if choice.index == 0]
        return "".join((choice.delta.content if hasattr(choice, "delta") else choice.text) or "" for choice in first)
    if hasattr(answer, "output_text"):
        return answer.output_text
    return texts_of(answer)[0]


def texts_of(answer):
    return [choice.text if hasattr(choice, "text") else choice.message.content for choice in answer.choices]


def scores(answer):
    return answer.choices[0].logprobs


def is_object(answer):
    return json.loads(text_of(answer))["a"] in ("yes", "no")


def adds_up(answer):
    usage = answer.usage
    return usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


# Each row: a route, its options, and what must be true of the answer.
ANSWERED = {
    "head": ("completions", {}, lambda a: (a.object, a.model, a.id[:5]) == ("text_completion", "tiny", "cmpl-")),
    "usage": ("completions", {}, lambda a: adds_up(a) and a.usage.completion_tokens == 6),
    "length": ("completions", {}, lambda a: a.choices[0].finish_reason == "length"),
    "default length": ("completions", {"max_tokens": None}, lambda a: a.usage.completion_tokens == 16),
    "n": ("completions", {"n": 3, **SAMPLED}, lambda a: len({*texts_of(a)}) == 3),
    "n greedy": ("completions", {"n": 3}, lambda a: len({*texts_of(a)}) == 1 and a.usage.completion_tokens == 18),
    "indices": (
        "completions",
        {"n": 2, "prompt": ["a", "b"], "seed": 1},
        lambda a: [c.index for c in a.choices] == [0, 1, 2, 3],
    ),
    "prompts": ("completions", {"prompt": ["a", "b"]}, lambda a: len(a.choices) == 2),
    "ids": ("completions", {"prompt": [5, 6, 7]}, lambda a: a.usage.prompt_tokens == 3),
    "several ids": ("completions", {"prompt": [[5, 6], [7]]}, lambda a: a.usage.prompt_tokens == 3),
    "empty prompt": ("completions", {"prompt": ""}, lambda a: a.usage.prompt_tokens == 1),
    "echo": ("completions", {"echo": True}, lambda a: text_of(a).startswith(PROMPT)),
    "no logprobs": ("completions", {}, lambda a: scores(a) is None),
    "logprobs 0": ("completions", {"logprobs": 0}, lambda a: scores(a).top_logprobs == [{}] * 6),
    "logprobs 5": ("completions", {"logprobs": 5}, lambda a: [len(t) for t in scores(a).top_logprobs] == [5] * 6),
    "logprobs of greedy": (
        "completions",
        {"logprobs": 1},
        lambda a: [max(t.values()) for t in scores(a).top_logprobs] == scores(a).token_logprobs,
    ),
    "logprobs of the prompt": (
        "completions",
        {"logprobs": 1, "echo": True},
        lambda a: len(scores(a).tokens) == a.usage.total_tokens,
    ),
    "offsets": ("completions", {"logprobs": 0}, lambda a: scores(a).text_offset[0] == 0),
    "stream": ("completions", {"stream": True}, lambda a: a[-1].choices[0].finish_reason == "length"),
    "stream without usage": ("completions", {"stream": True}, lambda a: not any(e.usage for e in a)),
    "stream with usage": ("completions", {**STREAM_WITH_USAGE}, lambda a: a[-1].choices == [] and adds_up(a[-1])),
    "stream of two": (
        "completions",
        {"stream": True, "n": 2, **SAMPLED},
        lambda a: {c.index for e in a for c in e.choices} == {0, 1},
    ),
    "stream logprobs": (
        "completions",
        {"stream": True, "logprobs": 1},
        lambda a: sum(len(c.logprobs.tokens) for e in a for c in e.choices if c.logprobs) == 6,
    ),
    "one id": ("completions", {"stream": True}, lambda a: len({e.id for e in a}) == 1),
    "penalties": ("completions", {"presence_penalty": 2, "frequency_penalty": -2}, text_of),
    "bias": ("completions", {"logit_bias": {"9": 100}, "logprobs": 0}, lambda a: len({*scores(a).tokens}) == 1),
    "top_p": ("completions", {"temperature": 1.5, "top_p": 0.2, "seed": 1}, text_of),
    "timeout": ("completions", {"extra_body": {"timeout": 60}}, text_of),
    "beams": ("completions", {"temperature": None, "num_beams": 3, "length_penalty": 0.5}, text_of),
    "two beams": ("completions", {"n": 2, "temperature": None, "num_beams": 2}, lambda a: len({*texts_of(a)}) == 2),
    "filters": ("completions", {"temperature": 1, "top_k": 9, "min_p": 0.1, "typical_p": 0.9}, text_of),
    "history": ("completions", {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, text_of),
    "least length": ("completions", {"min_tokens": 6}, lambda a: a.usage.completion_tokens == 6),
    "priority": ("completions", {"priority": 5}, text_of),
    "json object": ("completions", {"max_tokens": 60, **SAMPLED, "response_format": FORMAT}, is_object),
    "chat head": (
        "chat",
        {},
        lambda a: (
            (a.object, a.choices[0].message.role, a.choices[0].message.refusal)
            == ("chat.completion", "assistant", None)
        ),
    ),
    "chat usage": ("chat", {}, adds_up),
    "chat length": ("chat", {"max_tokens": None, "max_completion_tokens": 3}, lambda a: a.usage.completion_tokens == 3),
    "system": ("chat", {"messages": [{"role": "system", "content": "Be brief"}, *HELLO]}, text_of),
    "empty answer before": ("chat", {"messages": [*HELLO, SILENT, *HELLO]}, text_of),
    "name": ("chat", {"messages": [{"role": "user", "name": "Ann", "content": "Hello"}]}, text_of),
    "parts": ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}, text_of),
    "chat n": ("chat", {"n": 2, **SAMPLED}, lambda a: len({*texts_of(a)}) == 2),
    "chat logprobs": ("chat", {"logprobs": True}, lambda a: [t.top_logprobs for t in scores(a).content] == [[]] * 6),
    "chat top_logprobs": (
        "chat",
        {"logprobs": True, "top_logprobs": 3},
        lambda a: all(len(t.top_logprobs) == 3 for t in scores(a).content),
    ),
    "chat stream": (
        "chat",
        {"stream": True},
        lambda a: a[0].choices[0].delta.role == "assistant" and a[-1].choices[0].finish_reason == "length",
    ),
    "chat stream with usage": (
        "chat",
        {**STREAM_WITH_USAGE},
        lambda a: not any(e.usage for e in a[:-1]) and adds_up(a[-1]),
    ),
    "chat stream of two": (
        "chat",
        {"stream": True, "n": 2, **SAMPLED},
        lambda a: sum(c.finish_reason == "length" for e in a for c in e.choices) == 2,
    ),
    "chat stream logprobs": (
        "chat",
        {"stream": True, "logprobs": True},
        lambda a: sum(len(c.logprobs.content) for e in a for c in e.choices if c.logprobs) == 6,
    ),
    "tools": ("chat", {"tools": [TOOL]}, lambda a: a.usage.prompt_tokens > 30),
    "tools that may not be called": (
        "chat",
        {"tools": [TOOL], "tool_choice": "none"},
        lambda a: a.usage.prompt_tokens < 30,
    ),
    "plain text": ("chat", {"response_format": {"type": "text"}}, text_of),
    "chat json": ("chat", {"max_tokens": 60, **SAMPLED, "response_format": FORMAT}, is_object),
    "any json": (
        "chat",
        {"max_tokens": 3, "response_format": {"type": "json_object"}},
        lambda a: text_of(a).lstrip().startswith("{"),
    ),
    "choice": (
        "chat",
        {"max_tokens": 20, "structured_outputs": {"choice": ["heaven", "earth"]}},
        lambda a: text_of(a) in ("heaven", "earth"),
    ),
    "regex": (
        "chat",
        {"max_tokens": 20, "structured_outputs": {"regex": "[ab]{3}"}},
        lambda a: {*text_of(a)} <= {*"ab"} and len(text_of(a)) == 3,
    ),
    "grammar": (
        "chat",
        {"max_tokens": 20, "structured_outputs": {"grammar": 'start: "God " ("yes" | "no")'}},
        lambda a: text_of(a)[:4] == "God ",
    ),
    "schema": ("chat", {"max_tokens": 60, **SAMPLED, "structured_outputs": {"json": OBJECT}}, is_object),
    "constraint in a stream": (
        "chat",
        {"max_tokens": 20, "stream": True, "structured_outputs": {"choice": ["heaven"]}},
        lambda a: text_of(a) == "heaven",
    ),
    "response": (
        "responses",
        {},
        lambda a: (a.object, a.status, a.output[0].content[0].type) == ("response", "incomplete", "output_text"),
    ),
    "response usage": ("responses", {}, lambda a: a.usage.total_tokens == a.usage.input_tokens + a.usage.output_tokens),
    "why a response is cut": ("responses", {}, lambda a: a.incomplete_details.reason == "max_output_tokens"),
    "whole response": (
        "responses",
        {"structured_outputs": {"choice": ["earth"]}},
        lambda a: (a.status, a.output_text) == ("completed", "earth"),
    ),
    "instructions": ("responses", {"instructions": "Be brief"}, lambda a: a.instructions == "Be brief"),
    "response metadata": ("responses", {"metadata": {"a": "b"}}, lambda a: a.metadata == {"a": "b"}),
    "conversation": ("responses", {"input": [*HELLO, {"role": "developer", "content": "Be brief"}]}, text_of),
    "typed items": (
        "responses",
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}]},
        text_of,
    ),
    "response settings": (
        "responses",
        {"temperature": 0.5, "top_p": 0.9},
        lambda a: (a.temperature, a.top_p) == (0.5, 0.9),
    ),
    "response stream": (
        "responses",
        {"stream": True},
        lambda a: (
            [a[0].type, a[-1].type] == ["response.created", "response.incomplete"]
            and a[-1].response.output_text == text_of(a)
        ),
    ),
    "numbered events": ("responses", {"stream": True}, lambda a: [e.sequence_number for e in a] == [*range(len(a))]),
    "embedding": ("embeddings", {}, lambda a: math.isclose(sum(x * x for x in a.data[0].embedding), 1, abs_tol=1e-4)),
    "embeddings": ("embeddings", {"input": ["God", "earth"]}, lambda a: [row.index for row in a.data] == [0, 1]),
    "embedding of ids": ("embeddings", {"input": [5, 6, 7]}, lambda a: a.usage.prompt_tokens == 3),
    "embeddings of ids": (
        "embeddings",
        {"input": [[5], [6, 7]]},
        lambda a: (len(a.data), a.usage.total_tokens) == (2, 3),
    ),
    "floats": ("embeddings", {"encoding_format": "float"}, lambda a: len(a.data[0].embedding) == 28),
    "base64": ("embeddings", {"encoding_format": "base64"}, lambda a: isinstance(a.data[0].embedding, str)),
    "dimensions": ("embeddings", {"dimensions": 28}, lambda a: len(a.data[0].embedding) == 28),
    "pooling": ("embeddings", {"pooling": "mean"}, lambda a: len(a.data[0].embedding) == 28),
    "model": ("models", {"model": "tiny"}, lambda a: (a.id, a.object, a.owned_by) == ("tiny", "model", "monoblock")),
    **{
        f"{name} is ignored": ("chat", {name: VALUES.get(name, "x")}, lambda a, name=name: a.ignored_fields == [name])
        for name in IGNORED
    },
}


@pytest.mark.parametrize("name", ANSWERED)
def test_a_call_is_answered(call, name):
    route, options, holds = ANSWERED[name]
    assert holds(call(route, **options))


# Each row: a route, its options, the status, the code and the field, and a part of the message.
WRONG = {
    "model": ("chat", {"model": "tony"}, 404, "model_not_found", "model", "did you mean 'tiny'"),
    "retrieved model": ("models", {"model": "tony"}, 404, "model_not_found", "model", "did you mean 'tiny'"),
    "long prompt": ("completions", {"prompt": "the " * 300}, 400, "context_length_exceeded", None, "shorten it"),
    "long chat": ("chat", {"messages": HELLO * 40}, 400, "context_length_exceeded", None, "shorten it"),
    "long response": ("responses", {"input": "a " * 300}, 400, "context_length_exceeded", None, "shorten it"),
    "long embedding": ("embeddings", {"input": ["a", "the " * 300]}, 400, None, None, "line 2 has"),
    "large body": (
        "chat",
        {"messages": [{"role": "user", "content": "a" * (5 << 20)}]},
        413,
        "too_large",
        None,
        "larger",
    ),
    "large text": ("completions", {"prompt": "a" * (1 << 20) + "a"}, 400, None, "prompt", "1048576"),
    "n": ("completions", {"n": 0}, 400, None, "n", "greater than or equal to 1"),
    "many": ("completions", {"n": 129}, 400, None, "n", "less than or equal to 128"),
    "temperature": ("chat", {"temperature": -1}, 400, None, "temperature", "temperature"),
    "top_p": ("chat", {"temperature": 1, "top_p": 2}, 400, None, None, "top_p=2"),
    "max_tokens": ("chat", {"max_tokens": 0}, 400, None, "max_tokens", "max_tokens"),
    "both lengths": ("chat", {"max_completion_tokens": 3}, 400, None, None, "write one of them"),
    "seed": ("completions", {"seed": -1}, 400, None, None, "seed"),
    "stops": ("completions", {"stop": ["a"] * 17}, 400, None, "stop", "stop"),
    "empty stop": ("completions", {"stop": ""}, 400, None, None, "stop"),
    "logprobs": ("completions", {"logprobs": 21}, 400, None, "logprobs", "20"),
    "top_logprobs": ("chat", {"logprobs": True, "top_logprobs": 21}, 400, None, "top_logprobs", "20"),
    "top_logprobs alone": ("chat", {"top_logprobs": 2}, 400, None, None, "logprobs=true"),
    "bias": ("completions", {"logit_bias": {"9999": 1}}, 400, None, None, "vocabulary"),
    "id": ("completions", {"prompt": [9999]}, 400, None, None, "9999"),
    "embedded id": ("embeddings", {"input": [9999]}, 400, None, None, "9999"),
    "dimensions": ("embeddings", {"dimensions": 5}, 400, None, None, "28"),
    "pooling": ("embeddings", {"pooling": "max"}, 400, None, "pooling", "pooling"),
    "no messages": ("chat", {"messages": []}, 400, None, "messages", "messages"),
    "image": ("chat", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, None, None, "not text"),
    "no role": ("chat", {"messages": [{"content": "x"}]}, 400, None, "messages.0.role", "missing"),
    "tool_choice": ("chat", {"tools": [TOOL], "tool_choice": "required"}, 400, None, "tool_choice", "'none' or 'auto'"),
    "format": ("chat", {"response_format": {"type": "xml"}}, 400, None, "response_format.type", "json_schema"),
    "no schema": ("chat", {"response_format": {"type": "json_schema"}}, 400, None, None, "json_schema={"),
    "schema": (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        400,
        None,
        None,
        "cannot be followed",
    ),
    "regex": ("chat", {"structured_outputs": {"regex": "("}}, 400, None, None, "cannot be followed"),
    "two constraints": (
        "chat",
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        400,
        None,
        None,
        "write one of them",
    ),
    "no constraint": ("chat", {"structured_outputs": {}}, 400, None, None, "has no constraint"),
    "misspelt constraint": (
        "chat",
        {"structured_outputs": {"regexp": "a"}},
        400,
        None,
        "structured_outputs.regexp",
        "no field",
    ),
    "beams": ("completions", {"early_stopping": True}, 400, None, None, "early_stopping=True"),
    "beams that sample": ("completions", {"temperature": 1, "num_beams": 2}, 400, None, None, "num_beams=2"),
    "filter": ("completions", {"temperature": None, "top_p": 0.5, "num_beams": 2}, 400, None, None, "top_p=0.5"),
    "responses n": ("responses", {"n": 2}, 400, None, None, "leave out n"),
    "response format": ("responses", {"text": {"format": {"type": "json_object"}}}, 400, None, None, "text.format"),
    "response item": (
        "responses",
        {"input": [{"type": "item_reference", "id": "x"}]},
        400,
        None,
        None,
        "not a message",
    ),
    "typo": ("completions", {"temprature": 1}, 400, None, "temprature", "did you mean 'temperature'"),
    "stream option": (
        "completions",
        {"stream": True, "stream_options": {"usage": True}},
        400,
        None,
        "stream_options.usage",
        "no field",
    ),
    "soon": ("completions", {"max_tokens": 80, "extra_body": {"timeout": 0.001}}, 408, "timeout", None, "give it more"),
    **{f"{name} is refused": ("completions", {name: "x"}, 400, None, name, REFUSED[name]) for name in REFUSED},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_call_is_refused_in_one_line(call, name):
    route, options, status, code, field, message = WRONG[name]
    with pytest.raises(openai.APIStatusError) as caught:
        call(route, **options)
    problem = caught.value
    assert (problem.status_code, problem.code, problem.param) == (status, code, field)
    assert message in problem.body["message"]
    assert "\n" not in problem.body["message"]


def test_the_same_seed_gives_the_same_text_and_another_one_another(call):
    first, again, other = (text_of(call("chat", seed=seed, temperature=1, max_tokens=9)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("route", ["completions", "chat", "responses"])
def test_a_stream_has_the_text_of_the_whole_answer(call, route):
    assert text_of(call(route, stream=True)) == text_of(call(route))


@pytest.mark.parametrize("several", [False, True])
def test_a_stop_string_ends_a_text(call, several):
    whole = text_of(call("completions", max_tokens=9))
    stop = whole[3:6]
    answer = call("completions", max_tokens=9, stop=["nothing of this", stop] if several else stop)
    assert text_of(answer) == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_token_ids_are_the_text_that_they_stand_for(call):
    pipe = tiny_pipeline()
    prompt, ids = pipe.encode_prompt(PROMPT).ids, pipe.tokenizer.encode(PROMPT)
    assert text_of(call("completions", prompt=list(prompt))) == text_of(call("completions"))
    first, second = call("embeddings", input=[ids, ids]).data
    assert first.embedding == second.embedding == pytest.approx(call("embeddings").data[0].embedding, abs=1e-6)


def test_keys_and_full_queues_are_the_exceptions_of_the_client(client, gate, monkeypatch):
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"
    monkeypatch.setattr(gate, "most", 0)
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="tiny", prompt="x")
    assert refused.value.code == "queue_full"
    assert refused.value.response.headers["retry-after"] == "1"
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_there_are_a_hundred_cases():
    assert len(ANSWERED) + len(WRONG) >= 100
