"""OpenAI's routes for text: completions, chat and responses."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from monoblock.errors import InputError
from monoblock.inference.scheduler import TokenScores
from monoblock.serving.metrics import TokenClock
from monoblock.serving.receipts import make_receipt
from monoblock.serving.requests import MAX_PROMPTS, ChatBody, CompletionBody, DecodingBody, ResponsesBody, as_list
from monoblock.serving.served_model import Job, OutOfTime, Piece, ServedModel, merge, split_seed
from monoblock.serving.streams import EventStream, begin, prepare, unless_gone

router = APIRouter(prefix="/v1")


@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_describe_model(model) for model in request.app.state.server.models.values()]}


@router.get("/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    return _describe_model(request.app.state.server.find(name))


def _describe_model(model: ServedModel) -> dict[str, Any]:
    context = model.pipe.model.config.context
    own = {"max_model_len": context, "routes": [f"/v1/{name}" for name in model.abilities]}
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "monoblock", **own}


# -- the texts of a request -------------------------------------------------------------------------------------------


@dataclass
class Choice:
    """One text of an answer, as far as it has come."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)
    prompt_scores: list[TokenScores] = field(default_factory=list)
    num_cached: int = 0
    finish_reason: str | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)  # for each token, if the request looks inside


class Answer:
    """The texts of one request: `num_choices` of each prompt, in the order of the prompts."""

    def __init__(
        self, request: Request, model: ServedModel, jobs: Sequence[Job], body: DecodingBody, prefix: str
    ) -> None:
        self.model, self.body = model, body
        self.jobs = [split_seed(job, number) for number, job in enumerate(jobs)]
        self.id, self.created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self.clock = TokenClock(request.app.state.server.metrics)
        self.num_choices = jobs[0].settings.num_return_sequences * jobs[0].copies
        self.choices = [Choice() for _ in range(self.num_choices * len(jobs))]

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield (choice, piece) as the texts grow, and keep them."""
        timeout = self.body.timeout
        end = None if timeout is None else time.monotonic() + timeout
        async with aclosing(merge([self.model.pieces(job) for job in self.jobs])) as merged:
            while True:
                try:
                    number, piece = await asyncio.wait_for(
                        anext(merged), None if end is None else end - time.monotonic()
                    )
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise OutOfTime(f"the answer was not ready within {timeout:g} s; give it more as timeout") from None
                index = number * self.num_choices + piece.index
                choice = self.choices[index]
                choice.text += piece.text
                choice.tokens += piece.tokens
                choice.scores += piece.scores
                choice.prompt_scores += piece.prompt_scores
                choice.num_cached += piece.num_cached
                choice.finish_reason = piece.finish_reason
                choice.seen += [] if piece.seen is None else [piece.seen]
                self.clock.tick(len(piece.tokens))
                yield index, piece

    def job_of(self, index: int) -> Job:
        return self.jobs[index // self.num_choices]

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(job.prompt.source or job.prompt.ids) for job in self.jobs)
        completion = sum(len(choice.tokens) for choice in self.choices)
        cached = sum(choice.num_cached for choice in self.choices[:: self.num_choices])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}

    def extras(self) -> dict[str, Any]:
        """Return what an answer has beyond OpenAI's: the fields that had no effect, and the receipt."""
        found: dict[str, Any] = {}
        if names := self.body.ignored_fields():
            found["ignored_fields"] = names
        if self.body.receipt:
            texts = [
                [choice.tokens for choice in self.choices[first : first + self.num_choices]]
                for first in range(0, len(self.choices), self.num_choices)
            ]
            found["receipt"] = make_receipt(self.model, self.jobs, texts)
        return found


async def _respond(
    request: Request,
    answer: Answer,
    whole: Callable[[Answer], dict[str, Any]],
    events: Callable[[Answer], AsyncGenerator[Any, None]],
    *,
    done: bool = True,
) -> Response | dict[str, Any]:
    """Return the events of an answer if the request wants a stream, else the whole answer."""
    if answer.body.stream:
        begun = await unless_gone(request, begin(events(answer)))
        if isinstance(begun, Response):
            return begun
        return EventStream(begun, request.app.state.server.error_event, done=done)

    async def work() -> dict[str, Any]:
        async with aclosing(answer.pieces()) as pieces:
            async for _ in pieces:
                pass
        return whole(answer)

    return await unless_gone(request, work())


def _seen(*tokens: dict[str, Any] | None) -> dict[str, Any]:
    """Return the field of a choice with what the request has looked into, for each token; nothing if it has not."""
    return {"inspect": tokens} if any(tokens) else {}


def _wants_usage(body: DecodingBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


# -- completions ------------------------------------------------------------------------------------------------------


@router.post("/completions", response_model=None)
async def completions(request: Request, body: CompletionBody) -> Response | dict[str, Any]:
    """Continue one or several prompts."""
    model = request.app.state.server.model(body.model, "completions")
    prompts = as_list(body.prompt)
    if len(prompts) > MAX_PROMPTS:
        raise InputError(f"prompt has {len(prompts)} texts; send at most {MAX_PROMPTS} in a request")
    model.loop.check_room(len(prompts))
    extra = {} if body.logprobs is None else {"logprobs": body.logprobs, "score_prompt": body.echo}

    def make_jobs() -> list[Job]:
        return model.jobs(body, [model.encode(prompt) for prompt in prompts], extra=extra, salt=request.state.salt)

    jobs = await prepare(request, make_jobs, is_quick=body.is_quick)
    return await _respond(request, Answer(request, model, jobs, body, "cmpl"), _completion, _completion_events)


def _completion(answer: Answer) -> dict[str, Any]:
    choices = []
    for index, choice in enumerate(answer.choices):
        logprobs = _completion_logprobs(answer, index, choice.tokens, choice.scores, choice.prompt_scores, 0)
        text = _echo(answer, index) + choice.text
        end = {"finish_reason": choice.finish_reason, **_seen(*choice.seen)}
        choices.append({"index": index, "text": text, "logprobs": logprobs, **end})
    return {**answer.head("text_completion"), "choices": choices, "usage": answer.usage(), **answer.extras()}


async def _completion_events(answer: Answer) -> AsyncGenerator[dict[str, Any], None]:
    offsets, begun = [0] * len(answer.choices), set[int]()
    async with aclosing(answer.pieces()) as pieces:
        async for index, piece in pieces:
            text = ("" if index in begun else _echo(answer, index)) + piece.text
            begun.add(index)
            scores = _completion_logprobs(
                answer, index, piece.tokens, piece.scores, piece.prompt_scores, offsets[index]
            )
            offsets[index] += sum(map(len, scores["tokens"])) if scores else 0
            end = {"finish_reason": piece.finish_reason, **_seen(piece.seen)}
            choice = {"index": index, "text": text, "logprobs": scores, **end}
            if text or piece.finish_reason or scores or piece.seen:
                yield {**answer.head("text_completion"), "choices": [choice]}
    usage = {"usage": answer.usage()} if _wants_usage(answer.body) else {}
    if extras := answer.extras() | usage:
        yield {**answer.head("text_completion"), "choices": [], **extras}


def _echo(answer: Answer, index: int) -> str:
    body = answer.body
    assert isinstance(body, CompletionBody)
    return answer.model.pipe.tokenizer.decode(answer.job_of(index).prompt.ids) if body.echo else ""


def _completion_logprobs(
    answer: Answer,
    index: int,
    tokens: Sequence[int],
    scores: Sequence[TokenScores],
    prompt_scores: Sequence[TokenScores],
    offset: int,
) -> dict[str, Any] | None:
    """Return the log-probabilities of tokens in the form of completions; those of an echoed prompt come first."""
    body = answer.body
    assert isinstance(body, CompletionBody)
    if body.logprobs is None:
        return None
    rows: list[tuple[int, TokenScores | None]] = list(zip(tokens, scores, strict=False))
    if body.echo and prompt_scores:
        rows = [*zip(answer.job_of(index).prompt.ids, [None, *prompt_scores], strict=True), *rows]
    names, offsets = [_name(answer.model.spell(token)) for token, _ in rows], []
    for token, _ in rows:
        offsets.append(offset)
        offset += len(answer.model.spell_text(token))
    spell = answer.model.spell
    tops = [None if one is None else {_name(spell(token)): value for token, value in one.top} for _, one in rows]
    values = [None if one is None else one.logprob for _, one in rows]
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _name(raw: bytes) -> str:
    """Return the bytes of a token as text, in OpenAI's notation if they are not whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


# -- chat -------------------------------------------------------------------------------------------------------------


@router.post("/chat/completions", response_model=None)
async def chat_completions(request: Request, body: ChatBody) -> Response | dict[str, Any]:
    """Answer a conversation.  `tools` are given to the model's template; calls in the answer are left as text."""
    model = request.app.state.server.model(body.model, "chat/completions")
    if body.top_logprobs and not body.logprobs:
        raise InputError("top_logprobs has no effect without logprobs; write logprobs=true")
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    answer = Answer(request, model, [await _chat_job(request, model, body, messages)], body, "chatcmpl")
    return await _respond(request, answer, _chat, _chat_events)


async def _chat_job(
    request: Request, model: ServedModel, body: ChatBody | ResponsesBody, messages: Sequence[dict[str, Any]]
) -> Job:
    messages = [{**message, "content": _plain_text(message.get("content"))} for message in messages]
    tools = body.tools if isinstance(body, ChatBody) and body.tool_choice != "none" else None
    extra = {"logprobs": body.top_logprobs or 0} if isinstance(body, ChatBody) and body.logprobs else {}

    def make_job() -> Job:
        prompt = model.encode_chat(messages, **({"tools": tools} if tools else {}))
        return model.jobs(body, [prompt], extra=extra, salt=request.state.salt, new_text=True)[0]

    return await asyncio.to_thread(make_job)  # another process renders the template


def _plain_text(content: Any) -> Any:
    """Return the text of a message whose content is in parts."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    kinds = ("text", "input_text", "output_text")
    said = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in kinds]
    texts = [text for text in said if isinstance(text, str)]
    if len(texts) < len(parts):
        raise InputError("a message has a part that is not text; send parts such as {'type': 'text', 'text': 'Hello'}")
    return "".join(texts)


def _chat(answer: Answer) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(answer, choice.tokens, choice.scores),
            "finish_reason": choice.finish_reason,
            **_seen(*choice.seen),
        }
        for index, choice in enumerate(answer.choices)
    ]
    return {**answer.head("chat.completion"), "choices": choices, "usage": answer.usage(), **answer.extras()}


async def _chat_events(answer: Answer) -> AsyncGenerator[dict[str, Any], None]:
    head = answer.head("chat.completion.chunk")
    usage: dict[str, Any] = {"usage": None} if _wants_usage(answer.body) else {}
    begun: set[int] = set()
    async with aclosing(answer.pieces()) as pieces:
        async for index, piece in pieces:
            choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
            if index not in begun:
                begun.add(index)
                yield {**head, "choices": [{**choice, "delta": {"role": "assistant", "content": ""}}], **usage}
            scores = _chat_logprobs(answer, piece.tokens, piece.scores)
            if piece.text or scores or piece.seen:
                more = {"delta": {"content": piece.text}, "logprobs": scores, **_seen(piece.seen)}
                yield {**head, "choices": [{**choice, **more}], **usage}
            if piece.finish_reason:
                yield {**head, "choices": [{**choice, "delta": {}, "finish_reason": piece.finish_reason}], **usage}
    if extras := answer.extras() | ({"usage": answer.usage()} if usage else {}):
        yield {**head, "choices": [], **extras}


def _chat_logprobs(answer: Answer, tokens: Sequence[int], scores: Sequence[TokenScores]) -> dict[str, Any] | None:
    body = answer.body
    if not isinstance(body, ChatBody) or not body.logprobs:
        return None

    def describe(token: int, logprob: float) -> dict[str, Any]:
        raw = answer.model.spell(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return {
        "content": [
            {**describe(token, one.logprob), "top_logprobs": [describe(*pair) for pair in one.top]}
            for token, one in zip(tokens, scores, strict=False)
        ],
        "refusal": None,
    }


# -- responses --------------------------------------------------------------------------------------------------------


@router.post("/responses", response_model=None)
async def responses(request: Request, body: ResponsesBody) -> Response | dict[str, Any]:
    """Answer a text or a conversation in the form of OpenAI's Responses: text in, text out."""
    model = request.app.state.server.model(body.model, "responses")
    if body.n != 1:
        raise InputError("responses has one answer; leave out n, or ask /v1/chat/completions")
    if body.text is not None and body.text.get("format", {"type": "text"}) != {"type": "text"}:
        raise InputError("text.format is not supported here; write structured_outputs, or ask /v1/chat/completions")
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    said = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for item in said:
        if item.get("type", "message") != "message" or not isinstance(item.get("role"), str):
            raise InputError("input has an item that is not a message; send {'role': 'user', 'content': 'Hello'}")
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": item.get("content")})
    answer = Answer(request, model, [await _chat_job(request, model, body, messages)], body, "resp")
    return await _respond(request, answer, _response, _response_events, done=False)


def _response(answer: Answer, status: str | None = None) -> dict[str, Any]:
    body, choice = answer.body, answer.choices[0]
    assert isinstance(body, ResponsesBody)
    is_cut = choice.finish_reason == "length"
    status = status or ("incomplete" if is_cut else "completed")
    usage = answer.usage()
    counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    details = {"input_tokens_details": usage["prompt_tokens_details"], "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "model": answer.model.name,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "output": [] if status == "in_progress" else [_output_item(answer, status)],
        "parallel_tool_calls": False,
        "temperature": answer.jobs[0].settings.temperature,
        "top_p": answer.jobs[0].settings.top_p,
        "tool_choice": "none",
        "tools": [],
        "usage": None if status == "in_progress" else {**counts, **details, "total_tokens": usage["total_tokens"]},
        **({} if status == "in_progress" else answer.extras()),
    }


def _output_item(answer: Answer, status: str) -> dict[str, Any]:
    content = [] if status == "in_progress" else [_output_text(answer.choices[0].text)]
    return {"id": f"msg-{answer.id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


async def _response_events(answer: Answer) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
    number = 0
    place = {"item_id": f"msg-{answer.id}", "output_index": 0, "content_index": 0}

    def event(name: str, **values: Any) -> tuple[str, dict[str, Any]]:
        nonlocal number
        number += 1
        return f"response.{name}", {"type": f"response.{name}", "sequence_number": number - 1, **values}

    async with aclosing(answer.pieces()) as pieces:
        async for _, piece in pieces:
            if not number:
                started = _response(answer, "in_progress")
                yield event("created", response=started)
                yield event("in_progress", response=started)
                yield event("output_item.added", output_index=0, item=_output_item(answer, "in_progress"))
                yield event("content_part.added", **place, part=_output_text(""))
            if piece.text:
                yield event("output_text.delta", **place, delta=piece.text, logprobs=[])
    text, whole = answer.choices[0].text, _response(answer)
    yield event("output_text.done", **place, text=text, logprobs=[])
    yield event("content_part.done", **place, part=_output_text(text))
    yield event("output_item.done", output_index=0, item=whole["output"][0])
    yield event(whole["status"], response=whole)
