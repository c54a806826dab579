"""Routes for what is no chat: embeddings, translation, classification, masks, and tokens."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from monoblock.errors import InputError
from monoblock.serving.requests import (
    ClassifyBody,
    DecodingBody,
    DetokenizeBody,
    EmbeddingsBody,
    FillBody,
    TokenizeBody,
    TranslateBody,
    as_list,
)
from monoblock.serving.served_model import ServedModel
from monoblock.serving.streams import end_tasks, unless_gone
from monoblock.tasks.classification import Prediction
from monoblock.tasks.embedding import embed_texts

router = APIRouter()
T = TypeVar("T")
Row = TypeVar("Row", str, list[int])
PART = 8192  # tokens or characters that a model reads between two steps of its engine


async def _long_answer(work: Callable[[], dict[str, Any]]) -> Response:
    """Return what `work` returns as JSON; both are done in another thread."""
    return Response(await asyncio.to_thread(lambda: json.dumps(work())), media_type="application/json")


async def _in_parts(
    model: ServedModel, rows: list[Row], function: Callable[[list[Row], range], Iterable[T]]
) -> list[T]:
    """Return what a function of rows and their numbers returns, called for a few at a time: the engine goes on."""
    found: list[T] = []
    while len(found) < len(rows):
        first, sizes = len(found), itertools.accumulate(map(len, rows[len(found) :]))
        last = first + max(1, sum(1 for size in sizes if size <= PART))
        found.extend(await model.loop.call(function, rows[first:last], range(first, last)))
    return found


@router.post("/v1/embeddings", response_model=None)
async def embeddings(request: Request, body: EmbeddingsBody) -> Response | dict[str, Any]:
    """Return a vector for each text."""
    model: ServedModel = request.app.state.server.model(body.model, "embeddings")
    width = model.pipe.model.config.width
    if body.dimensions not in (None, width):
        raise InputError(f"dimensions={body.dimensions} is not the width of {model.name}; leave it out: {width}")

    def encode() -> list[list[int]]:
        encode = model.text_tokenizer.encode
        return [encode(text) if isinstance(text, str) else text for text in as_list(body.input)]

    def embed(rows: list[list[int]], numbers: range) -> Iterable[np.ndarray]:
        vectors = embed_texts(model.pipe, rows, pooling=body.pooling, lines=numbers)
        return vectors.float().cpu().numpy().astype(np.float32)

    async def work() -> Response:
        texts = await asyncio.to_thread(encode)
        rows = await _in_parts(model, texts, embed)
        as_base64 = body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(row.tobytes()).decode() if as_base64 else row.tolist(),
            }
            for index, row in enumerate(rows)
        ]
        count = sum(map(len, texts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return await _long_answer(lambda: {"object": "list", "model": model.name, "data": data, "usage": usage})

    return await unless_gone(request, work())


@router.post("/v1/translate", response_model=None)
async def translate(request: Request, body: TranslateBody) -> Response | dict[str, Any]:
    """Translate texts, with beam search as the model's folder says; the n best of each, and which words are which."""
    model: ServedModel = request.app.state.server.model(body.model, "translate")
    texts = as_list(body.input)
    model.loop.check_room(len(texts))
    beams = max(body.num_beams or model.pipe.defaults.options.get("num_beams", 1), body.n_best)
    given = {"length_penalty": body.length_penalty, "max_new_tokens": body.max_tokens}
    options = {name: value for name, value in given.items() if value is not None}
    options |= {"num_return_sequences": body.n_best, "temperature": 0.0} | ({"num_beams": beams} if beams > 1 else {})
    plain = DecodingBody(model=body.model)

    async def one(text: str) -> list[dict[str, Any]]:
        prompt = await asyncio.to_thread(model.encode_source, text, body.to)
        job = model.job(plain, prompt, extra=options, salt=request.state.salt, new_text=True)
        found: list[dict[str, Any]] = [{"text": "", "score": None, "finish_reason": None} for _ in range(body.n_best)]
        async for piece in model.pieces(job):
            hypothesis = found[piece.index]
            hypothesis["text"] += piece.text
            hypothesis["score"], hypothesis["finish_reason"] = piece.score, piece.finish_reason
        if body.alignments:
            for hypothesis in found:
                hypothesis["alignment"] = await model.loop.call(model.align, text, hypothesis["text"], body.to)
        return found

    async def work() -> dict[str, Any]:
        tasks = [asyncio.create_task(one(text)) for text in texts]
        try:
            rows = await asyncio.gather(*tasks)
        finally:
            await end_tasks(*tasks)
        return _listed(model, [{"hypotheses": hypotheses} for hypotheses in rows])

    return await unless_gone(request, work())


@router.post("/v1/classify", response_model=None)
async def classify(request: Request, body: ClassifyBody) -> Response | dict[str, Any]:
    """Return the most probable classes of each text."""
    model: ServedModel = request.app.state.server.model(body.model, "classify")
    texts = as_list(body.input)

    async def work() -> dict[str, Any]:
        rows = await _in_parts(model, texts, lambda part, lines: model.pipe.classify(part, top=body.top, lines=lines))
        return _listed(model, [{"classes": _predictions(row, "label")} for row in rows])

    return await unless_gone(request, work())


@router.post("/v1/fill", response_model=None)
async def fill(request: Request, body: FillBody) -> Response | dict[str, Any]:
    """Return the most probable tokens for each mask of each text."""
    model: ServedModel = request.app.state.server.model(body.model, "fill")
    texts = as_list(body.input)

    async def work() -> dict[str, Any]:
        rows = await _in_parts(model, texts, lambda part, lines: model.pipe.fill(part, top=body.top, lines=lines))
        return _listed(
            model, [{"text": row.text, "masks": [_predictions(mask, "token") for mask in row.masks]} for row in rows]
        )

    return await unless_gone(request, work())


def _predictions(row: Iterable[Prediction], word: str) -> list[dict[str, Any]]:
    return [{word: one.label, "probability": one.probability} for one in row]


def _listed(model: ServedModel, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a list of answers in OpenAI's form, one for each text."""
    return {"object": "list", "model": model.name, "data": [{"index": index, **row} for index, row in enumerate(rows)]}


@router.post("/tokenize", response_model=None)
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """Cut a text into tokens."""
    tokenizer = request.app.state.server.find(body.model).text_tokenizer

    def work() -> dict[str, Any]:
        ids = tokenizer.encode(body.text, add_specials=body.add_special_tokens)
        spelling = {token: tokenizer.token(token) for token in set(ids)}
        return {"tokens": ids, "pieces": [spelling[token] for token in ids], "count": len(ids)}

    return await _long_answer(work)


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeBody) -> dict[str, Any]:
    """Put tokens together to a text."""
    tokenizer = request.app.state.server.find(body.model).text_tokenizer
    return {"text": await asyncio.to_thread(lambda: tokenizer.decode(body.tokens))}
