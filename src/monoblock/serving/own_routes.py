"""Routes for what is no chat: embeddings, translation, classification, masks, and tokens."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable
from typing import Any

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
)
from monoblock.serving.served_model import ServedModel
from monoblock.serving.streams import end_tasks, unless_gone
from monoblock.tasks.classification import Prediction

router = APIRouter()


def _texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


@router.post("/v1/embeddings", response_model=None)
async def embeddings(request: Request, body: EmbeddingsBody) -> Response | dict[str, Any]:
    """Return a vector for each text."""
    model: ServedModel = request.app.state.server.model(body.model, "embeddings")
    width = model.pipe.model.config.width
    if body.dimensions not in (None, width):
        raise InputError(f"dimensions={body.dimensions} is not the width of {model.name}; leave it out: {width}")
    texts = _texts(body.input)

    async def work() -> Response:
        parts = [  # between which the engine makes steps
            await model.loop.call(lambda part=part: model.pipe.embed(part, pooling=body.pooling).float().cpu().numpy())
            for part in (texts[first : first + 32] for first in range(0, len(texts), 32))
        ]
        rows = np.concatenate(parts).astype(np.float32)
        as_base64 = body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(row.tobytes()).decode() if as_base64 else row.tolist(),
            }
            for index, row in enumerate(rows)
        ]
        count = await asyncio.to_thread(lambda: sum(len(model.pipe.tokenizer.encode(text)) for text in texts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        answer = {"object": "list", "model": model.name, "data": data, "usage": usage}
        return Response(await asyncio.to_thread(lambda: json.dumps(answer)), media_type="application/json")

    return await unless_gone(request, work())


@router.post("/v1/translate", response_model=None)
async def translate(request: Request, body: TranslateBody) -> Response | dict[str, Any]:
    """Translate texts, with beam search as the model's folder says; the n best of each, and which words are which."""
    model: ServedModel = request.app.state.server.model(body.model, "translate")
    texts = _texts(body.input)
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
    texts = _texts(body.input)

    async def work() -> dict[str, Any]:
        rows = await model.loop.call(lambda: model.pipe.classify(texts, top=body.top))
        return _listed(model, [{"classes": _predictions(row, "label")} for row in rows])

    return await unless_gone(request, work())


@router.post("/v1/fill", response_model=None)
async def fill(request: Request, body: FillBody) -> Response | dict[str, Any]:
    """Return the most probable tokens for each mask of each text."""
    model: ServedModel = request.app.state.server.model(body.model, "fill")
    texts = _texts(body.input)

    async def work() -> dict[str, Any]:
        rows = await model.loop.call(lambda: model.pipe.fill(texts, top=body.top))
        return _listed(
            model, [{"text": row.text, "masks": [_predictions(mask, "token") for mask in row.masks]} for row in rows]
        )

    return await unless_gone(request, work())


def _predictions(row: Iterable[Prediction], word: str) -> list[dict[str, Any]]:
    return [{word: one.label, "probability": one.probability} for one in row]


def _listed(model: ServedModel, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a list of answers in OpenAI's form, one for each text."""
    return {"object": "list", "model": model.name, "data": [{"index": index, **row} for index, row in enumerate(rows)]}


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeBody) -> dict[str, Any]:
    """Cut a text into tokens."""
    tokenizer = request.app.state.server.find(body.model).text_tokenizer
    ids = await asyncio.to_thread(lambda: tokenizer.encode(body.text, add_specials=body.add_special_tokens))
    return {"tokens": ids, "pieces": [tokenizer.token(token) for token in ids], "count": len(ids)}


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeBody) -> dict[str, Any]:
    """Put tokens together to a text."""
    tokenizer = request.app.state.server.find(body.model).text_tokenizer
    return {"text": await asyncio.to_thread(lambda: tokenizer.decode(body.tokens))}
