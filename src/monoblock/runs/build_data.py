"""Build the data of a recipe: read the corpus, find the tokenizer, build the batches of the objective."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from monoblock.data.corpora.load import Corpus, infer_corpus_kind, load_corpus, load_corpus_if_present
from monoblock.data.fingerprint import fingerprint_rows
from monoblock.data.readers.records import CorpusKind
from monoblock.errors import ConfigError, FileError
from monoblock.interop.tokenizer_folder import load_tokenizer
from monoblock.recipes.model_config import is_vision
from monoblock.recipes.schema import OBJECTIVE_REQUIREMENTS, AugmentSection, Recipe
from monoblock.runs.generation_config import DECODER_START_KEY
from monoblock.runs.warm_start import WarmStart
from monoblock.tasks.chat.data import build_chat_data
from monoblock.tasks.classification.data import build_classification_data
from monoblock.tasks.classification.images import build_image_data
from monoblock.tasks.language_modeling.data import build_causal_lm_data
from monoblock.tasks.masked_lm.data import build_masked_lm_data
from monoblock.tasks.question_answering.data import build_question_answering_data
from monoblock.tasks.seq2seq.data import build_seq2seq_data
from monoblock.tasks.seq2seq.pairs import load_synthetic_pairs, mix_pairs, prepare_pairs
from monoblock.tasks.span_corruption.data import build_span_corruption_data
from monoblock.tasks.special_tokens import check_required_tokens, default_special_tokens
from monoblock.tasks.table import CORPUS_KINDS
from monoblock.tasks.task_data import TaskData
from monoblock.tasks.text_to_text.data import convert_to_pairs, load_extra_tasks, task_corpus_kind
from monoblock.tasks.token_classification.data import build_token_classification_data
from monoblock.tokenizers.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


class CorpusSplits(NamedTuple):
    train: Corpus
    valid: Corpus | None
    labels: list[str]
    digests: dict[str, str]  # split -> SHA-256 of its content


def build_task_data(
    recipe: Recipe,
    context: int | None,
    *,
    data_folder: Path | None = None,
    run_folder: Path | None = None,
    start: WarmStart | None = None,
) -> TaskData:
    """Read the corpus of a recipe and prepare its training and validation batches.

    context: longest sample in tokens; None means no limit.
    data_folder: folder with corpora.
    run_folder: the folder of a resumed run, whose tokenizer is used.
    start: the model that training starts from.
    """
    objective = recipe.train.objective
    train, valid, labels, digests = _prepare_splits(recipe, data_folder, start)
    _check_modality(recipe, train)
    if train.kind == "images":
        return replace(build_image_data(recipe, train, valid, labels), content_digests=digests)
    tokenizer = find_tokenizer(recipe, train, run_folder, start.tokenizer if start is not None else None)
    start_id = None if start is None else start.special_tokens.get(DECODER_START_KEY)
    builders: dict[str, Callable[..., TaskData]] = {
        "causal": build_causal_lm_data,
        "masked": build_masked_lm_data,
        "spans": build_span_corruption_data,
        "pairs": partial(build_seq2seq_data, start_id=start_id),
        "classify": partial(build_classification_data, labels=labels),
        "label": partial(build_token_classification_data, labels=labels),
        "answers": build_question_answering_data,
        "chat": build_chat_data,
    }
    return replace(builders[objective](recipe, context, tokenizer, train, valid), content_digests=digests)


# -- the corpus -------------------------------------------------------------------------------------------------------


def _prepare_splits(recipe: Recipe, data_folder: Path | None, start: WarmStart | None) -> CorpusSplits:
    """Return the training and validation rows, with the synthetic pairs and extra tasks of the recipe added."""
    objective, section = recipe.train.objective, recipe.data
    train, valid = _load_splits(recipe, data_folder)
    if objective == "pairs" and section.prefix:  # labels and answers become texts
        train, valid = convert_to_pairs(train), None if valid is None else convert_to_pairs(valid)
    labels = train.labels()  # before the limit, which must not lose a class
    if start is not None and start.keeps_head(OBJECTIVE_REQUIREMENTS[objective].head, recipe.model):
        labels = start.match_labels(labels)
    digests = _digests(corpus for corpus in (train, valid) if corpus is not None)
    train = prepare_pairs(replace(train, rows=train.rows[: section.limit]), section)
    if train.kind not in CORPUS_KINDS[objective]:
        kinds = " or ".join(CORPUS_KINDS[objective])
        raise ConfigError(f"train.objective={objective!r} needs {kinds}, but the corpus {train.name} is {train.kind}")
    synthetic = load_synthetic_pairs(section, data_folder)
    if synthetic is not None:
        digests["synthetic"] = fingerprint_rows(synthetic)
        train = replace(train, rows=mix_pairs(train.rows, synthetic.rows, section.ratio))
    valid = None if valid is None else prepare_pairs(valid, section)
    if section.tasks:
        train = replace(train, rows=[*train.rows, *load_extra_tasks(section, "train", data_folder)])
        digests["tasks"] = fingerprint_rows(train)
        if valid is not None:
            valid = replace(valid, rows=[*valid.rows, *load_extra_tasks(section, "valid", data_folder)])
    return CorpusSplits(train, valid, labels, digests)


def _digests(splits: Iterable[Corpus]) -> dict[str, str]:
    return {corpus.split: fingerprint_rows(corpus) for corpus in splits}


def _load_splits(recipe: Recipe, data_folder: Path | None) -> tuple[Corpus, Corpus | None]:
    """Return training and validation rows; the latter are the last `data.held` training rows, or the split `valid`."""
    name, held, kind = recipe.data.corpus, recipe.data.held, _corpus_kind(recipe, data_folder)
    train = load_corpus(name, "train", folder=data_folder, kind=kind)
    if held:
        if held >= len(train):
            raise ConfigError(
                f"data.held={held} leaves none of the {len(train)} rows to train on; write a smaller number"
            )
        return replace(train, rows=train.rows[:-held]), replace(train, split="valid", rows=train.rows[-held:])
    return train, load_corpus_if_present(name, "valid", folder=data_folder, kind=kind)


def _corpus_kind(recipe: Recipe, data_folder: Path | None) -> CorpusKind | None:
    """Return the kind of corpus to read a path as; None for a named corpus, whose kind is known."""
    if recipe.train.objective == "pairs" and recipe.data.prefix:
        return task_corpus_kind(recipe.data.corpus, recipe.data.prefix, data_folder)
    return infer_corpus_kind(recipe.data.corpus, CORPUS_KINDS[recipe.train.objective], folder=data_folder)


def _check_modality(recipe: Recipe, train: Corpus) -> None:
    """Raise ConfigError unless a vision model gets images, and any other model text."""
    if (train.kind == "images") != is_vision(recipe):
        reads = "reads images; give a corpus of images" if is_vision(recipe) else "reads text; write model.family='vit'"
        raise ConfigError(f"the corpus {train.name} is {train.kind}, and this model {reads}")
    if train.kind != "images" and recipe.data.augment != AugmentSection():
        raise ConfigError(f"data.augment varies images, and the corpus {train.name} is {train.kind}; leave it out")


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def find_tokenizer(
    recipe: Recipe, train: Corpus, run_folder: Path | None, initial_tokenizer: Tokenizer | None = None
) -> Tokenizer:
    """Return the tokenizer of the run folder, else of the initial model, else of tokenizer.folder, else train one."""
    objective, section = recipe.train.objective, recipe.tokenizer
    if run_folder is not None and (run_folder / TOKENIZER_FILE).is_file():
        return check_required_tokens(load_tokenizer(run_folder), objective, run_folder)
    if initial_tokenizer is not None:
        return check_required_tokens(initial_tokenizer, objective, Path(recipe.model["folder"]))
    if section.folder:
        folder = Path(section.folder)
        if not (folder / TOKENIZER_FILE).is_file():
            raise FileError(
                f"tokenizer.folder={folder} has no {TOKENIZER_FILE}; name another folder, or none to train one"
            )
        return check_required_tokens(Tokenizer.from_pretrained(folder), objective, folder)
    return Tokenizer.train(
        section.kind,
        train.texts(),
        section.vocab,
        marker=section.marker,
        specials=default_special_tokens(recipe, train),
        lowercase=section.lowercase,
    )
