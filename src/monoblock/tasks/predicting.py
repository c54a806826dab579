"""What a text or an image is, and where it stands: classes with probabilities, and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.errors import InputError, did_you_mean
from monoblock.heads import pool
from monoblock.tasks.framing import Framed
from monoblock.tasks.passing import Tell, check_long, fitted, frame_of, nobody, numbered, passed, too_long

if TYPE_CHECKING:
    from monoblock.tasks.pipeline import Pipeline

POOLINGS = ("mean", "cls")
HEADS = {"classifier": "classify", "tagger": "tag", "masked_lm": "fill", "spans": "answer", "pooled": "embed"}
Text = str | tuple[str, str]


class Choice(NamedTuple):
    """One of the answers a model could give."""

    label: str
    probability: float


def method_of(pipe: Pipeline) -> str:
    """Which method a model's head is made for; "" where it is for none of them."""
    head = getattr(pipe.model.config, "head", None)
    if head is None:
        return "embed" if getattr(pipe.model.config, "family", "") in ("encoder-only", "vision") else ""
    return HEADS.get(head.kind, "")


def check_head(pipe: Pipeline, kind: str) -> None:
    head = getattr(pipe.model.config, "head", None)
    has = "none" if head is None else head.kind
    if has != kind:
        known = method_of(pipe)
        instead = f"; call {known}" if known else ""
        raise InputError(f"{HEADS[kind]} needs a model with the head {kind!r}, and this one has {has!r}{instead}")


# -- classes --------------------------------------------------------------------------------------------------------


def probabilities(
    pipe: Pipeline,
    texts: Sequence[Text],
    *,
    batch: int = 64,
    long: str = "refuse",
    lines: Sequence[int] | None = None,
    tell: Tell = nobody,
) -> Tensor:
    """(texts, classes); a text that was split has the mean of its parts, weighed by their tokens."""
    check_head(pipe, "classifier")
    check_long(long)
    parts = [_parts(pipe, line, text, long) for line, text in numbered(texts, lines)]
    found = iter(passed(pipe, [row for rows in parts for row in rows], batch, pipe.model, tell=tell))
    return torch.stack([_weighed([(shares(next(found)), len(row.ids)) for row in rows]) for rows in parts])


def shares(logits: Tensor) -> Tensor:
    """Probabilities of the classes; a single one is there or not."""
    return logits.sigmoid() if logits.shape[-1] == 1 else logits.softmax(-1)


def _parts(pipe: Pipeline, line: int, text: Text, long: str) -> list[Framed]:
    encode = pipe.tokenizer.encode
    if isinstance(text, str):
        return fitted(pipe, line, text, encode, long)
    one, other = (encode(part) for part in text)
    made = frame_of(pipe, pipe.model.config.context)(one, other)
    if made.cut and long != "cut":
        raise too_long(line, len(frame_of(pipe)(one, other).ids), pipe.model.config.context, ("cut",))
    return [made]


def _weighed(rows: Sequence[tuple[Tensor, int]]) -> Tensor:
    whole = sum(weight for _, weight in rows)
    return torch.stack([row * (weight / whole) for row, weight in rows]).sum(0)


def image_probabilities(pipe: Pipeline, images: Sequence[Any], *, batch: int = 64, tell: Tell = nobody) -> Tensor:
    """(images, classes), from pixels between 0 and 1."""
    check_head(pipe, "classifier")
    return torch.cat([shares(some) for some in _seen(pipe, images, batch, pipe.model, tell)])


def _seen(pipe: Pipeline, images: Sequence[Any], batch: int, ask: Any, tell: Tell) -> list[Tensor]:
    found = []
    with torch.inference_mode():
        for start in range(0, len(images), batch):
            pixels = torch.stack([torch.as_tensor(one) for one in images[start : start + batch]]).float()
            weight = next(pipe.model.parameters())
            found.append(ask(pipe.pixels(pixels).to(weight.device, weight.dtype)).float().cpu())
            tell(len(pixels))
    return found


def choices(labels: Sequence[str], row: Tensor, top: int) -> list[Choice]:
    """The `top` most probable, best first."""
    values, places = row.topk(min(top, len(row)))
    return [Choice(labels[place], value) for place, value in zip(places.tolist(), values.tolist(), strict=True)]


# -- embeddings -----------------------------------------------------------------------------------------------------


def embeddings(
    pipe: Pipeline,
    texts: Sequence[str],
    *,
    pooling: str | None = None,
    normalize: bool = True,
    batch: int = 64,
    long: str = "refuse",
    lines: Sequence[int] | None = None,
    tell: Tell = nobody,
) -> Tensor:
    """(texts, width): the mean over the tokens of a text, or the first token; of length one unless told otherwise."""
    how = _pooling(pipe, pooling)
    check_long(long)
    parts = [fitted(pipe, line, text, pipe.tokenizer.encode, long) for line, text in numbered(texts, lines)]
    rows = [row for some in parts for row in some]

    def ask(source: Tensor, **more: Any) -> Tensor:
        hidden: Any = pipe.model.encode(source, **more)
        return pool(hidden, more.get("attention_mask"), how)

    found = iter(passed(pipe, rows, batch, ask, tell=tell))
    whole = torch.stack([_weighed([(next(found), len(row.ids)) for row in some]) for some in parts])
    return F.normalize(whole, dim=-1) if normalize else whole


def image_embeddings(
    pipe: Pipeline, images: Sequence[Any], *, pooling: str | None = None, normalize: bool = True, batch: int = 64
) -> Tensor:
    how, encode = _pooling(pipe, pooling), cast(Any, pipe.model.encode)
    whole = torch.cat(_seen(pipe, images, batch, lambda pixels: pool(encode(pixels), None, how), nobody))
    return F.normalize(whole, dim=-1) if normalize else whole


def _pooling(pipe: Pipeline, given: str | None) -> str:
    asked = given or pipe.pooling
    if asked not in POOLINGS:
        raise InputError(f"pooling={asked!r} is none of {', '.join(POOLINGS)}{did_you_mean(asked, POOLINGS)}")
    if pipe.model.encoder is None:
        raise InputError(f"a {pipe.model.config.family} model has no encoder to embed with; give an encoder")
    return "first" if asked == "cls" else asked
