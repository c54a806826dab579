"""What a head does: statistics and scores of its attention weights, and the head that resolves a pronoun.

Statistics (Clark et al. 2019) are its entropy, its distance, and its shares on single tokens.

Induction and duplicate-token heads are found on random tokens that are repeated (Olsson et al. 2022): in
A B C … A B C …, an induction head at the second A attends to the token after the first A, a duplicate-token head to the
first A itself.  Positional and rare-token heads are those of Voita et al. (2019).  The best of many heads has a score
above zero by chance alone.  The level of chance is what the best head reaches in 95 % of draws in which each token puts
the weights that it has on random keys among those that it sees.

Coreference is a score over pairs of sentences that differ in one word.  In "The animal didn't cross the street because
it was too tired", `it` is the animal; with "wide" it is the street.  A head resolves a sentence if its weight from `it`
is larger on the right noun than on the other one.  Both nouns stay where they are, so a head that knows only positions
resolves one sentence of each pair: 50 %.  The best of many heads is above that by chance, so the result also has the
score that the best head reaches if the two sentences of each pair are swapped at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inspection.trace import trace
from monoblock.nn.transformer import Transformer
from monoblock.tokenizers.tokenizer import Tokenizer

FIXED_SHARE = 0.5  # a head attends to a fixed token, such as the previous one, if this share of its weight is on it
LOCAL_DISTANCE = 0.5  # a head is local if its mean distance is below this fraction of that of uniform attention
FIXED_TOKENS = ("previous", "next", "first", "own")


@dataclass(frozen=True)
class HeadStatistics:
    """Means over the queries of a text. A query that has a single visible key tells nothing and is left out."""

    layer: str  # such as "decoder.3.attention"
    head: int
    entropy: float  # in nats; 0: all weight on one token
    max_entropy: float  # of uniform attention to the visible tokens
    distance: float  # between a token and those it attends to, weighted; special tokens are left out
    uniform_distance: float  # the same for uniform attention
    previous: float  # the share of the weight on the token before
    next: float
    first: float  # on the first token of the text
    own: float

    @property
    def scope(self) -> str:
        """ "local" or "global", by the distance relative to that of uniform attention."""
        return "local" if self.distance < LOCAL_DISTANCE * self.uniform_distance else "global"

    @property
    def fixed_token(self) -> str:
        """The token that has at least half of the weight: "previous", "next", "first", "own", or "" for none."""
        token = max(FIXED_TOKENS, key=lambda name: float(getattr(self, name)))
        return token if getattr(self, token) >= FIXED_SHARE else ""

    def describe(self) -> str:
        """Return the fixed token with its share, as "first 84 %", or else the scope."""
        token = self.fixed_token
        return f"{token} {getattr(self, token):.0%}".replace("%", " %") if token else self.scope

    def to_json(self) -> dict[str, Any]:
        numbers = {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return numbers | {"scope": self.scope, "fixed_token": self.fixed_token}


def head_statistics(
    weights: Mapping[str, Tensor], valid: Tensor | None = None, special: Tensor | None = None
) -> list[HeadStatistics]:
    """Return the statistics of every head of self-attention.

    weights: attention weights (B, H, T, T) by name, as `trace(model, ids, names="*.attention.weights")` returns them.
    valid: True for real tokens (B, T); None means all.
    special: True for special tokens (B, T), such as [CLS] and [SEP]. Many heads rest on them if they have nothing to
        do, so the weight on them does not count for the distance.
    """
    result = []
    for name, tensor in weights.items():
        rows = {key: values.tolist() for key, values in _statistics(tensor.double(), valid, special).items()}
        for head in range(tensor.shape[1]):
            numbers = {key: values[head] for key, values in rows.items()}
            result.append(HeadStatistics(layer=name.removesuffix(".weights"), head=head, **numbers))
    return result


def _statistics(weights: Tensor, valid: Tensor | None, special: Tensor | None) -> dict[str, Tensor]:
    """Return each statistic for the heads of one layer, (H,)."""
    B, H, T, S = weights.shape
    if T != S:
        raise ValueError("statistics are defined for self-attention over a whole text")
    positions = torch.arange(T, device=weights.device)
    distance = (positions[:, None] - positions).abs().double()
    visible = (weights > 0).any(1)  # (B, T, S); a key that no head of the layer gives weight to is masked
    queries = visible.sum(-1) > 1
    if valid is not None:
        queries = queries & valid
    uniform = visible.double() / visible.sum(-1, keepdim=True).clamp(min=1)  # (B, T, S)

    def mean(values: Tensor) -> Tensor:
        """Average values (B, H, T) or (B, 1, T) over the queries."""
        selected = queries[:, None].expand(B, values.shape[1], T)
        return ((values * selected).sum((0, 2)) / selected.sum((0, 2)).clamp(min=1)).expand(H)

    def share(offset: int) -> Tensor:
        """Return the weight (B, H, T) on the token at an offset; 0 if there is none."""
        diagonal = weights.diagonal(offset, -2, -1)
        padding = (-offset, 0) if offset < 0 else (0, offset)
        return torch.nn.functional.pad(diagonal, padding)

    def mean_distance(shares: Tensor) -> Tensor:
        """Return the mean distance (B, H or 1, T) by shares on the keys, leaving out special tokens."""
        shares = shares if special is None else shares.masked_fill(special[:, None, None, :], 0)
        return (shares * distance).sum(-1) / shares.sum(-1).clamp(min=1e-12)

    return {
        "entropy": mean(-torch.special.xlogy(weights, weights).sum(-1)),
        "max_entropy": mean(-torch.special.xlogy(uniform, uniform).sum(-1)[:, None]),
        "distance": mean(mean_distance(weights)),
        "uniform_distance": mean(mean_distance(uniform[:, None])),
        "previous": mean(share(-1)),
        "next": mean(share(1)),
        "first": mean(weights[..., 0]),
        "own": mean(share(0)),
    }


DRAWS, LEVEL = 200, 0.95


@dataclass(frozen=True)
class HeadScores:
    """Each score is between 0 and 1; None if it was not measured."""

    layer: str
    head: int
    induction: float | None = None  # mean weight on the token after the former occurrence of the same token
    duplicate: float | None = None  # mean weight on the former occurrence
    previous: float | None = None  # mean weight on the token before, in random text
    positional: float | None = None  # share of tokens whose largest weight is at one offset: -1 or +1
    rare: float | None = None  # share of tokens whose largest weight is on the rarest token they can see

    def to_json(self) -> dict[str, Any]:
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


def repeated_token_scores(model: Transformer, *, length: int = 48, batch: int = 4, seed: int = 0) -> list[HeadScores]:
    """Score the heads of a decoder or an encoder on `length` random tokens that are repeated once."""
    return score_repeated_tokens(model, length=length, batch=batch, seed=seed)[0]


@torch.no_grad()
def score_repeated_tokens(
    model: Transformer, *, length: int = 48, batch: int = 4, seed: int = 0
) -> tuple[list[HeadScores], float]:
    """Return the scores of `repeated_token_scores` and their level of chance."""
    embedding = model.config.input
    if model.config.family not in ("decoder-only", "encoder-only") or not hasattr(embedding, "vocab"):
        raise InputError(f"repeated tokens are read by models of one stack, but this is {model.config.family}")
    length = min(length, (model.config.context or 2 * length) // 2)
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(embedding.vocab, (batch, length), generator=generator)
    seen = trace(model, torch.cat((half, half), 1).to(model.device), names="*.attention.weights")
    queries = torch.arange(length + 1, 2 * length, device=model.device)  # not the first: its induction token is its own
    result, best = [], torch.zeros(DRAWS)
    for name, weights in seen.items():
        offsets = (1 - length, -length, -1)
        means = [weights[:, :, queries, queries + offset].mean((0, 2)).tolist() for offset in offsets]
        scores, layer = zip(*means, strict=True), name.removesuffix(".weights")
        result += [
            HeadScores(layer, head, induction=one, duplicate=two, previous=three)
            for head, (one, two, three) in enumerate(scores)
        ]
        rows = weights[:, :, queries].float().cpu()  # (B, H, Q, S)
        keys = _draw_keys((rows > 0).any(1), DRAWS, seed)  # (B, Q, draws)
        drawn = rows.gather(-1, keys[:, None].expand(-1, rows.shape[1], -1, -1))
        best = torch.maximum(best, drawn.mean((0, 2)).amax(0))
    return result, float(best.quantile(LEVEL))


@torch.no_grad()
def text_chance(
    model: Transformer, ids: Sequence[int], *, special_ids: frozenset[int] = frozenset(), seed: int = 0
) -> dict[str, float]:
    """Return the level of chance of the positional and the rare-token scores on a text."""
    seen = trace(model, torch.tensor([list(ids)], device=model.device), names="*.attention.weights")
    counts = Counter(ids)
    frequencies = torch.tensor([_frequency(token, counts, special_ids) for token in ids])
    T, best = len(ids), torch.zeros(2, DRAWS)
    queries = torch.arange(1, T - 1)
    for weights in seen.values():
        visible, heads = (weights[0] > 0).any(0)[1:-1].cpu(), weights.shape[1]  # (queries, T)
        keys = _draw_keys(visible, DRAWS * heads, seed).T.unflatten(0, (DRAWS, heads))  # (draws, heads, queries)
        rarest = frequencies.expand(T - 2, T).masked_fill(~visible, float("inf")).amin(-1)
        beside = torch.maximum(*((keys == queries + step).double().mean(-1) for step in (-1, 1)))
        rare = (frequencies[keys] == rarest).double().mean(-1)
        best = torch.maximum(best, torch.stack((beside, rare)).amax(-1))
    return dict(zip(("positional", "rare"), best.double().quantile(LEVEL, -1).tolist(), strict=True))


def _draw_keys(visible: Tensor, draws: int, seed: int) -> Tensor:
    """Draw keys at random among the visible ones of each query; visible is (*, S), and the result (*, draws)."""
    chances = visible.float().flatten(0, -2)
    chances[~chances.any(-1)] = 1.0  # a query that sees nothing
    keys = torch.multinomial(chances, draws, replacement=True, generator=torch.Generator().manual_seed(seed))
    return keys.view(*visible.shape[:-1], draws)


@torch.no_grad()
def text_scores(
    model: Transformer, texts: Sequence[Sequence[int]], *, special_ids: frozenset[int] = frozenset()
) -> list[HeadScores]:
    """Score heads on texts, given as token ids: positional, and rare tokens by their frequency in these texts."""
    counts = Counter(token for ids in texts for token in ids)
    totals: dict[str, Tensor] = {}
    queries = 0
    for ids in texts:
        if len(ids) < 3:
            continue
        seen = trace(model, torch.tensor([list(ids)], device=model.device), names="*.attention.weights")
        frequencies = torch.tensor([_frequency(token, counts, special_ids) for token in ids], device=model.device)
        for name, weights in seen.items():
            hits = _count_hits(weights[0], frequencies)
            totals[name] = totals.get(name, 0) + hits
        queries += len(ids) - 2
    if not queries:
        raise InputError("the texts are too short to score heads; give at least one of three tokens")
    return [
        HeadScores(name.removesuffix(".weights"), head, positional=max(before, after), rare=rare)
        for name, hits in totals.items()
        for head, (before, after, rare) in enumerate((hits / queries).tolist())
    ]


def _frequency(token: int, counts: Mapping[int, int], special_ids: frozenset[int]) -> float:
    return float("inf") if token in special_ids else float(counts[token])


def _count_hits(weights: Tensor, frequencies: Tensor) -> Tensor:
    """Count the queries of each head whose largest weight is on the previous, the next and the rarest token, (H, 3).

    weights: (H, T, T); the first and the last query are left out, since they lack a neighbour.
    """
    T = weights.shape[-1]
    queries = torch.arange(1, T - 1, device=weights.device)
    best = weights[:, 1:-1].argmax(-1)  # (H, queries)
    visible = (weights > 0).any(0)[1:-1]  # (queries, T)
    seen = frequencies.expand(T - 2, T).masked_fill(~visible, float("inf"))
    is_rarest = frequencies[best] == seen.amin(-1)
    return torch.stack(((best == queries - 1).sum(-1), (best == queries + 1).sum(-1), is_rarest.sum(-1)), -1).double()


PRONOUNS = ("it", "he", "she", "they")
CHANCE_DRAWS = 1000
CHANCE_QUANTILE = 0.95


class CoreferencePair(NamedTuple):
    """A sentence with a gap `{}`: with the first word the pronoun is the first noun, with the second the second."""

    sentence: str
    first_noun: str
    second_noun: str
    first_word: str
    second_word: str


PAIRS = [
    CoreferencePair(*row)
    for row in (
        ("The animal didn't cross the street because it was too {}.", "animal", "street", "tired", "wide"),
        ("The trophy doesn't fit in the suitcase because it is too {}.", "trophy", "suitcase", "big", "small"),
        ("The truck could not pass the bridge because it was too {}.", "truck", "bridge", "heavy", "weak"),
        ("The ball broke the window because it was so {}.", "ball", "window", "hard", "thin"),
        ("The boat could not enter the harbor because it was too {}.", "boat", "harbor", "large", "shallow"),
        ("The dog could not reach the shelf because it was too {}.", "dog", "shelf", "short", "high"),
        ("The knife could not cut the bread because it was too {}.", "knife", "bread", "blunt", "hard"),
        ("The horse refused to enter the stable because it was too {}.", "horse", "stable", "afraid", "dark"),
        ("The letter did not fit in the envelope because it was too {}.", "letter", "envelope", "long", "narrow"),
        ("The child could not lift the box because it was too {}.", "child", "box", "young", "full"),
        ("The plane could not land on the runway because it was too {}.", "plane", "runway", "fast", "icy"),
        ("The cat could not climb the wall because it was too {}.", "cat", "wall", "fat", "smooth"),
        ("The lamp did not light the cellar because it was too {}.", "lamp", "cellar", "dim", "deep"),
        ("The army could not cross the river because it was too {}.", "army", "river", "exhausted", "cold"),
        ("The student could not finish the book because it was too {}.", "student", "book", "lazy", "thick"),
        ("The key would not open the lock because it was too {}.", "key", "lock", "bent", "rusty"),
        ("The bird would not eat the seed because it was too {}.", "bird", "seed", "sick", "bitter"),
        ("The car could not climb the hill because it was too {}.", "car", "hill", "slow", "steep"),
        ("The table would not go through the door because it was too {}.", "table", "door", "broad", "tight"),
        ("The fish did not swim in the pond because it was too {}.", "fish", "pond", "ill", "dirty"),
    )
]


class CoreferenceRow(NamedTuple):
    """One sentence, read by one head."""

    sentence: str
    referent: str  # the noun that the pronoun stands for
    other: str
    referent_weight: float  # from the pronoun to the tokens of the noun
    other_weight: float

    @property
    def is_resolved(self) -> bool:
        return self.referent_weight > self.other_weight


class CoreferenceResult(NamedTuple):
    layer: str  # of the best head
    head: int
    rows: list[CoreferenceRow]  # two for each pair
    num_heads: int
    chance: float  # the share that the best head reaches in 95 % of random swaps at most

    @property
    def score(self) -> float:
        """The share of sentences that the head resolves."""
        return sum(row.is_resolved for row in self.rows) / len(self.rows)

    @property
    def pair_score(self) -> float:
        """The share of pairs of which it resolves both sentences."""
        pairs = zip(self.rows[::2], self.rows[1::2], strict=True)
        return sum(one.is_resolved and two.is_resolved for one, two in pairs) / (len(self.rows) // 2)

    @property
    def misses(self) -> list[CoreferenceRow]:
        return [row for row in self.rows if not row.is_resolved]


Encode = Callable[[str], Sequence[int]]  # of a text, special tokens included


@torch.no_grad()
def find_coreference_head(
    model: Transformer, tokenizer: Tokenizer, encode: Encode, pairs: Sequence[CoreferencePair] = PAIRS
) -> CoreferenceResult:
    """Return the head of an encoder that resolves the most sentences, and what it does in each."""
    if model.encoder is None or model.config.family != "encoder-only":
        raise InputError(
            "coreference is measured in an encoder: in a decoder, the pronoun cannot attend to the word that decides it"
        )
    weights = []  # of each sentence: (heads of all layers, 2)
    rows = []
    for pair in pairs:
        for word, nouns in ((pair.first_word, (1, 2)), (pair.second_word, (2, 1))):
            sentence, referent, other = pair.sentence.format(word), pair[nouns[0]], pair[nouns[1]]
            ids = encode(sentence)
            seen = trace(model, torch.tensor([ids], device=model.device), names="encoder.*.attention.weights")
            pronoun = next(place for name in PRONOUNS if (place := find_word(tokenizer, ids, name)))
            places = [find_word(tokenizer, ids, noun) for noun in (referent, other)]
            maps = torch.cat([layer[0, :, pronoun].mean(1) for layer in seen.values()])  # (all heads, T)
            weights.append(torch.stack([maps[:, place].sum(-1) for place in places], -1).cpu())
            rows.append((sentence, referent, other))
            layers = {name.removesuffix(".weights"): layer.shape[1] for name, layer in seen.items()}
    table = torch.stack(weights, 1)  # (all heads, sentences, 2)
    resolved = table[..., 0] > table[..., 1]
    best = int(resolved.double().mean(1).argmax())
    names = [(layer, head) for layer, count in layers.items() for head in range(count)]
    return CoreferenceResult(
        *names[best],
        [CoreferenceRow(*row, *table[best, index].tolist()) for index, row in enumerate(rows)],
        len(names),
        _chance(table),
    )


def _chance(table: Tensor, seed: int = 0) -> float:
    """Return the share that the best head reaches in 95 % of draws, if sentences of pairs are swapped at random.

    A swap of both sentences of a pair exchanges the roles of the two nouns.
    """
    generator = torch.Generator().manual_seed(seed)
    right = table[..., 0] > table[..., 1]
    wrong = table[..., 0] < table[..., 1]
    swapped = torch.rand(CHANCE_DRAWS, table.shape[1] // 2, generator=generator) < 0.5
    swapped = swapped.repeat_interleave(2, 1)  # (draws, sentences)
    correct = swapped.double() @ wrong.double().T + (~swapped).double() @ right.double().T  # (draws, heads)
    return float((correct.amax(1) / table.shape[1]).quantile(CHANCE_QUANTILE))


def find_word(tokenizer: Tokenizer, ids: Sequence[int], word: str) -> list[int]:
    """Return the indices of the tokens of the first occurrence of a word; [] if it is not in the text."""
    texts = [tokenizer.decode([number]).strip().lower() for number in ids]
    for start in range(len(ids)):
        joined = ""
        for end in range(start, len(ids)):
            joined += texts[end].removeprefix("##")
            if joined == word and (end + 1 == len(ids) or not tokenizer.token(ids[end + 1]).startswith("##")):
                return list(range(start, end + 1))
            if not word.startswith(joined):
                break
    return []
