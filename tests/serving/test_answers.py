"""What the routes answer, compared with the library; the clients are OpenAI's own or the application itself."""

import asyncio
import json
import time

import openai
import pytest
import torch
from serving_support import KEY, ask, running_server, tiny_app, tiny_pipeline

from monoblock.serving.app import create_app
from monoblock.serving.served_model import ServedModel

PROMPT = "In the beginning"


@pytest.fixture(scope="module")
def client():
    with running_server(tiny_app()) as (_, address):
        yield openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline()


def test_a_completion_is_what_the_library_generates(client, pipe):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0)
    (expected,) = pipe.generate_hypotheses([PROMPT], max_new_tokens=9, temperature=0)[0]
    assert answer.choices[0].text == expected.text
    assert answer.usage.completion_tokens == expected.num_tokens == 9
    assert answer.choices[0].finish_reason == "length"


def test_a_seed_gives_the_text_of_the_library_and_each_prompt_the_next_seed(client, pipe):
    options = {"max_tokens": 7, "temperature": 0.9, "top_p": 0.9, "seed": 5}
    answer = client.completions.create(model="tiny", prompt=[PROMPT, "God"], n=2, **options)
    expected = pipe.generate_hypotheses(
        [PROMPT, "God"], max_new_tokens=7, temperature=0.9, top_p=0.9, seed=5, num_return_sequences=2
    )
    assert [choice.text for choice in answer.choices] == [one.text for row in expected for one in row]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 0}, {"n": 3, "extra_body": {"num_beams": 3}}])
def test_the_pieces_of_a_stream_are_the_whole_answer(client, options):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "seed": 1, **options}
    whole = client.completions.create(**options)
    texts = {}
    for event in client.completions.create(stream=True, stream_options={"include_usage": True}, **options):
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
        usage = event.usage
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert usage == whole.usage


def test_a_chat_follows_the_template_and_streams(client, pipe):
    messages = [{"role": "user", "content": "Hello"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == pipe.chat(messages, max_new_tokens=6, temperature=0)
    events = list(client.chat.completions.create(stream=True, **options))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content
    assert events[-1].choices[0].finish_reason == "length"


def test_parts_of_text_are_a_message(client):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    answers = [
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], max_tokens=5, temperature=0
        )
        for content in (parts, "Hello")
    ]
    assert answers[0].choices[0].message == answers[1].choices[0].message


def test_responses_answer_text_and_conversations(client, pipe):
    answer = client.responses.create(
        model="tiny", input="Hello", instructions="Be brief", max_output_tokens=6, temperature=0
    )
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    assert answer.output_text == pipe.chat(messages, max_new_tokens=6, temperature=0)
    assert answer.status == "incomplete"
    stream = client.responses.create(model="tiny", input=messages, max_output_tokens=6, temperature=0, stream=True)
    received = list(stream)
    assert received[0].type == "response.created"
    assert (
        "".join(event.delta for event in received if event.type == "response.output_text.delta") == answer.output_text
    )
    assert received[-1].response.output_text == answer.output_text


def test_log_probabilities_are_those_of_the_model(client, pipe):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=3, echo=True
    ).choices[0]
    ids = [*pipe.encode_prompt(PROMPT).ids]
    new = pipe.generate_hypotheses([PROMPT], max_new_tokens=4, temperature=0)[0][0].ids
    with torch.no_grad():
        log_probs = pipe.model(torch.tensor([[*ids, *new]]))[0].log_softmax(-1)
    expected = [float(log_probs[place, token]) for place, token in enumerate([*ids, *new][1:])]
    assert answer.logprobs.token_logprobs[0] is None
    assert answer.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=2e-5)
    assert len(answer.logprobs.top_logprobs[-1]) == 3
    assert max(answer.logprobs.top_logprobs[-1].values()) == pytest.approx(expected[-1], abs=2e-5)
    assert answer.text.startswith(PROMPT)


def test_log_probabilities_of_a_chat_have_their_bytes(client):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    assert b"".join(bytes(one.bytes) for one in content).decode("utf-8", "replace") == answer.choices[0].message.content
    assert all(len(one.top_logprobs) == 2 for one in content)


def test_embeddings_are_those_of_the_library_in_both_encodings(client, pipe):
    for encoding in ("float", "base64"):
        answer = client.embeddings.create(model="tiny", input=["God", "heaven"], encoding_format=encoding)
        rows = [row.embedding for row in answer.data]
        if encoding == "base64":
            continue  # the client decodes the default by itself, which the next line compares
        assert torch.tensor(rows) == pytest.approx(pipe.embed(["God", "heaven"]), abs=1e-6)
    default = client.embeddings.create(model="tiny", input="God")
    assert torch.tensor(default.data[0].embedding) == pytest.approx(pipe.embed("God"), abs=1e-6)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["yes", "no"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_a_text_follows_its_schema(client, seed):
    answer = client.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=80,
        seed=seed,
        extra_body={"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    )
    found = json.loads(answer.choices[0].text)
    assert set(found) == {"a", "b"}
    assert 0 <= found["a"] <= 99
    assert found["b"] in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        ({"choice": ["heaven", "earth"]}, {"heaven", "earth"}),
        ({"regex": "[ab]{3}"}, {x + y + z for x in "ab" for y in "ab" for z in "ab"}),
        ({"grammar": 'start: "God " ("yes" | "no")'}, {"God yes", "God no"}),
    ],
)
def test_a_text_follows_a_constraint_in_every_sequence(client, constraint, allowed):
    answer = client.completions.create(
        model="tiny", prompt="x", n=4, max_tokens=40, seed=2, extra_body={"structured_outputs": constraint}
    )
    assert {choice.text for choice in answer.choices} <= allowed
    assert len({choice.text for choice in answer.choices}) > 1


def test_a_request_may_look_inside(client, pipe):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    look = {"lens": 2, "attention": [[1, 0]]}
    answer = client.completions.create(**options, extra_body={"inspect": look}).choices[0].model_dump()
    ids = torch.tensor([[*pipe.encode_prompt(PROMPT).ids]])
    from monoblock import trace
    from monoblock.inspection.residual_stream import logit_lens

    seen = answer["inspect"][0]
    expected = logit_lens(pipe.model, ids, top=2)
    for layer, tokens in enumerate(seen["lens"]):
        probabilities = [one["probability"] for one in tokens]
        assert probabilities == pytest.approx(expected[layer + 1].probabilities[0, -1].tolist(), abs=1e-5)
    weights = trace(pipe.model, ids, names="decoder.1.attention.weights")["decoder.1.attention.weights"]
    assert seen["attention"][0]["weights"] == pytest.approx(weights[0, 0, -1].tolist(), abs=1e-5)
    assert answer["text"] == client.completions.create(**options).choices[0].text


def test_an_edit_changes_the_text_of_its_request_alone(client):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 0}
    plain = client.completions.create(**options).choices[0].logprobs.token_logprobs
    edit = {"names": "decoder.*.attention.heads", "heads": [0]}
    edited = client.completions.create(**options, extra_body={"inspect": {"edits": [edit]}}).choices[0].logprobs
    assert edited.token_logprobs != plain
    assert client.completions.create(**options).choices[0].logprobs.token_logprobs == plain


def test_a_translation_has_hypotheses_and_alignments():
    torch.manual_seed(0)
    import monoblock as mb
    from monoblock.runs.pipeline import Pipeline
    from monoblock.tasks.loaded_model import GenerationDefaults

    tokenizer = mb.Tokenizer.train("word", ["we see the red house and the old tree"], vocab_size=23, specials="seq2seq")
    model = mb.Transformer(mb.vaswani(vocab=tokenizer.vocab_size, width=28, depth=2, heads=2, context=40)).eval()
    defaults = GenerationDefaults({"max_new_tokens": 6, "num_beams": 3}, decoder_start_token_id=tokenizer.bos_id)
    pipe = Pipeline(model, tokenizer, defaults)
    gate = create_app([ServedModel("tiny", pipe)], [KEY])
    body = {"input": ["the red house", "the old tree"], "n_best": 2, "alignments": True}
    ((status, answer), (wrong, error)) = ask(gate, ("/v1/translate", body), ("/v1/chat/completions", {"messages": []}))
    assert status == 200
    for text, row in zip(body["input"], answer["data"], strict=True):
        expected = pipe.translate(text, n_best=2)
        assert [one["text"] for one in row["hypotheses"]] == [one.text for one in expected]
        assert [one["score"] for one in row["hypotheses"]] == pytest.approx([one.score for one in expected])
        assert all(len(pair) == 2 for one in row["hypotheses"] for pair in one["alignment"])
    assert wrong == 400
    assert "messages" in error["error"]["message"]


def test_tokens_come_and_go(client):
    gate = tiny_app()
    ((_, cut), (_, text)) = ask(
        gate, ("/tokenize", {"text": PROMPT}), ("/detokenize", {"tokens": tiny_pipeline().tokenizer.encode(PROMPT)})
    )
    assert cut["tokens"] == tiny_pipeline().tokenizer.encode(PROMPT)
    assert cut["count"] == len(cut["pieces"]) == len(cut["tokens"])
    assert text["text"] == PROMPT


def test_requests_of_every_shape_are_answered_as_alone_in_exact_mode():
    shapes = [
        {"temperature": 0},
        {"seed": 3, "n": 2},
        {"num_beams": 3, "n": 2},
        {"seed": 4, "top_k": 9, "presence_penalty": 0.5, "logprobs": 2},
        {"temperature": 0, "logprobs": 0, "prompt": PROMPT * 3},
    ]
    requests = [("/v1/completions", {"prompt": PROMPT, "max_tokens": 9, **shape}) for shape in shapes] * 3
    together = ask(tiny_app(exact=True, max_rows=8), *requests)
    alone = [ask(tiny_app(exact=True), request)[0] for request in requests[: len(shapes)]] * 3

    def bits(answer):
        return [(choice["text"], choice["logprobs"]) for choice in answer[1]["choices"]]

    assert all(status == 200 for status, _ in together)
    assert [bits(answer) for answer in together] == [bits(answer) for answer in alone]


def test_the_list_of_models_says_what_each_answers(client):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.routes == ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_the_usage_counts_the_tokens_of_prompts_that_were_found_in_pages(client, pipe):
    prompt = "the earth and the heaven " * 9
    shapes = {"seed": 1}, {"n": 2, "temperature": 0}, {"extra_body": {"num_beams": 2}}, {"prompt": [prompt, prompt]}
    answers = [
        client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 2, **shape}) for shape in shapes
    ]
    full = (len(pipe.tokenizer.encode(prompt)) - 1) // 16 * 16
    assert full > 16
    assert [one.usage.prompt_tokens_details.cached_tokens for one in answers] == [0, full, full, 2 * full]


@pytest.mark.parametrize(
    ("stated", "temperature"),
    [(None, 1.0), ({"do_sample": True, "temperature": 0.3}, 0.3), ({"do_sample": False}, 0.0)],
)
def test_a_folder_that_says_nothing_of_sampling_has_the_default_of_openai(tmp_path, pipe, stated, temperature):
    import monoblock as mb
    from monoblock.serving.requests import CompletionBody

    pipe.model.save_pretrained(tmp_path)
    pipe.tokenizer.save_pretrained(tmp_path)
    if stated is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    model = ServedModel("tiny", mb.load(tmp_path))
    job = model.job(CompletionBody(model="tiny", prompt=PROMPT), model.encode(PROMPT))
    assert job.settings.temperature == temperature


def test_answers_that_wait_are_cancelled_with_their_timeout(client):
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=70, extra_body={"timeout": 0.001})
    assert caught.value.status_code == 408


def test_a_stream_whose_time_is_up_says_so(monkeypatch):
    gate = tiny_app()
    engine = gate.app.state.server.models["tiny"].loop.engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: [time.sleep(0.05), step()][1])
    with running_server(gate) as (_, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=80, stream=True, extra_body={"timeout": 2}
        )
        events = []
        with pytest.raises(openai.APIError, match="give it more"):
            events.extend(event for event in stream)
    assert events


def test_a_stream_names_ignored_fields_and_its_offsets_are_those_of_the_whole(client):
    options = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "user": "x",
    }
    whole = client.completions.create(**options).model_dump()
    events = [event.model_dump() for event in client.completions.create(stream=True, **options)]
    assert whole["ignored_fields"] == events[-1]["ignored_fields"] == ["user"]
    rows = [choice["logprobs"]["text_offset"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [offset for row in rows for offset in row] == whole["choices"][0]["logprobs"]["text_offset"]


def test_a_tiny_temperature_is_greedy(client):
    answers = [
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=temperature)
        for temperature in (0, 1e-320, 1e-39)
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1


def test_pages_are_free_when_all_is_answered():
    async def main():
        gate = tiny_app()
        from monoblock.serving.replica import post

        async with gate.lifespan():
            requests = [{"model": "tiny", "prompt": f"{PROMPT} {n}", "max_tokens": 5, "n": 2} for n in range(9)]
            answers = await asyncio.gather(*(post(gate, KEY, "/v1/completions", body) for body in requests))
            engine = gate.app.state.server.models["tiny"].loop.engine
            for _ in range(100):
                if not engine.pages.num_in_use:
                    break
                await asyncio.sleep(0.02)
            return [status for status, _ in answers], engine.pages.num_in_use

    assert asyncio.run(main()) == ([200] * 9, 0)


@pytest.mark.parametrize(("head", "route"), [("classifier", "classify"), ("masked_lm", "fill")])
def test_encoders_classify_and_fill_masks(head, route):
    import monoblock as mb
    from monoblock.runs.pipeline import Pipeline

    texts = ["the red house", "the old tree"]
    tokenizer = mb.Tokenizer.train("wordpiece", texts * 3, vocab_size=60, specials="masked_lm")
    if head == "masked_lm":
        texts = [f"the {tokenizer.token(tokenizer.mask_id)} house"]
    torch.manual_seed(0)
    options = {"head": head, "classes": 3} if head == "classifier" else {"head": head}
    config = mb.bert(vocab=tokenizer.vocab_size, width=28, depth=2, heads=2, context=40, **options)
    labels = ["LABEL_0", "LABEL_1", "LABEL_2"]
    pipe = Pipeline(mb.Transformer(config).eval(), tokenizer, labels=labels)
    gate = create_app([ServedModel("tiny", pipe)], [KEY])
    ((status, answer),) = ask(gate, (f"/v1/{route}", {"input": texts, "top": 2}))
    assert status == 200
    for text, row in zip(texts, answer["data"], strict=True):
        if route == "classify":
            expected = [{"label": label, "probability": pytest.approx(p)} for label, p in pipe.classify(text, top=2)]
            assert row["classes"] == expected
        else:
            expected = pipe.fill(text, top=2)
            assert row["text"] == expected.text
            assert [[one["token"] for one in mask] for mask in row["masks"]] == [
                [one.label for one in mask] for mask in expected.masks
            ]
