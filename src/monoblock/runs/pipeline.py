"""The pipeline that `mb.load` returns: a loaded model with one method for each task on text or images.

    pipe = mb.load("runs/demo")
    pipe.generate("In the beginning")
    for text in pipe.stream("In the beginning", temperature=0.8, stop="\\n"): ...
    pipe.chat([{"role": "user", "content": "Hello"}])
    pipe.translate(["Guten Tag"], n_best=3)
    pipe.classify / .tag / .fill / .embed / .answer          # depending on the head of the model

`generate`, `stream`, `chat` and `translate` take the options of `model.generate`. `stop` gives strings at which the
generated text ends; the text does not include them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from monoblock.decoding.prompt import Prompt
from monoblock.decoding.settings import Settings
from monoblock.decoding.streaming_text import chunk_texts
from monoblock.nn.lstm import Recurrent
from monoblock.nn.transformer import Transformer
from monoblock.recipes.schema import DataSection
from monoblock.tasks.classification.predict import predict_image_probabilities, predict_probabilities
from monoblock.tasks.embedding.predict import embed_images, embed_texts
from monoblock.tasks.labels import top_predictions
from monoblock.tasks.loaded_model import GenerationDefaults, Hypothesis, LoadedModel
from monoblock.tasks.masked_lm.predict import fill_masks
from monoblock.tasks.question_answering.predict import answer_questions
from monoblock.tasks.seq2seq.predict import translate_texts
from monoblock.tasks.task import Task
from monoblock.tasks.token_classification.predict import split_words, tag_words
from monoblock.tokenizers.tokenizer import Tokenizer


@dataclass
class Pipeline:
    """A loaded model with methods that generate and predict; returned by `mb.load`."""

    loaded: LoadedModel
    task: Task | None = None  # a task that is not in the package

    @property
    def model(self) -> Transformer | Recurrent:
        return self.loaded.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def defaults(self) -> GenerationDefaults:
        return self.loaded.defaults

    @property
    def data_section(self) -> DataSection | None:
        """The [data] section of the recipe that trained the model; None for a model without a recipe."""
        return self.loaded.data_section

    @property
    def objective(self) -> str | None:
        return self.loaded.objective

    @property
    def labels(self) -> list[str]:
        """The class names of a classifier or tagger."""
        return self.loaded.labels

    @property
    def pooling(self) -> str:
        return self.loaded.pooling

    # -- generation ---------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str, *, stop: str | Sequence[str] = (), **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], *, stop: str | Sequence[str] = (), **options: Any) -> list[str]: ...
    def generate(self, prompt: str | Sequence[str], *, stop: str | Sequence[str] = (), **options: Any) -> Any:
        """Return the text that continues a prompt; for a list of prompts, return a list.

        With num_return_sequences above 1, each prompt gives a list of texts.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        texts = [
            [hypothesis.text for hypothesis in hypotheses] if len(hypotheses) > 1 else hypotheses[0].text
            for hypotheses in self.generate_hypotheses(prompts, stop=stop, **options)
        ]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(self, prompt: str, *, stop: str | Sequence[str] = (), **options: Any) -> Iterator[str]:
        """Yield the continuation of a prompt in pieces as it is generated; joined, they are the text of `generate`."""
        settings = self.resolve_settings(options, streaming=True)
        return chunk_texts(self.loaded.stream_chunks([self.encode_prompt(prompt)], [settings], stop))

    def generate_hypotheses(
        self, prompts: Sequence[str], *, stop: str | Sequence[str] = (), **options: Any
    ) -> list[list[Hypothesis]]:
        """Return num_return_sequences texts for each prompt, with token counts, finish reasons and scores."""
        encoded = [self.encode_prompt(prompt) for prompt in prompts]
        return self.loaded.generate(encoded, self.resolve_settings(options), stop)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, stop: str | Sequence[str] = (), **options: Any) -> str:
        """Return the next answer of the assistant to messages such as {"role": "user", "content": "Hello"}."""
        settings = self.resolve_settings(options)
        return self.loaded.generate([self.encode_chat(messages)], settings, stop, new_text=True)[0][0].text

    def chat_stream(
        self, messages: Sequence[Mapping[str, Any]], *, stop: str | Sequence[str] = (), **options: Any
    ) -> Iterator[str]:
        """Yield the next answer of the assistant in pieces, as it is generated."""
        prompt, settings = self.encode_chat(messages), self.resolve_settings(options, streaming=True)
        return chunk_texts(self.loaded.stream_chunks([prompt], [settings], stop, new_text=True))

    def resolve_settings(self, options: Mapping[str, Any], *, streaming: bool = False) -> Settings:
        """Return the decoding settings: the defaults of the model folder, overridden by options."""
        return self.loaded.resolve_settings(options, streaming=streaming)

    def encode_prompt(self, text: str) -> Prompt:
        """Encode a prompt or, for a model with an encoder, a source."""
        return self.loaded.encode_prompt(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """Encode a conversation with the chat template of the tokenizer."""
        return self.loaded.encode_chat(messages)

    # -- translation --------------------------------------------------------------------------------------------------

    @overload
    def translate(self, text: str, *, n_best: None = None, **more: Any) -> str: ...
    @overload
    def translate(self, text: str, *, n_best: int, **more: Any) -> list[Hypothesis]: ...
    @overload
    def translate(self, text: Iterable[str], *, n_best: None = None, **more: Any) -> list[str]: ...
    @overload
    def translate(self, text: Iterable[str], *, n_best: int, **more: Any) -> list[list[Hypothesis]]: ...
    def translate(
        self,
        text: str | Iterable[str],
        *,
        n_best: int | None = None,
        batch: int = 64,
        to: str | None = None,
        long: str = "refuse",
        first_index: int = 0,
        **options: Any,
    ) -> Any:
        """Translate a source, or a list of sources in their order; an empty source gives an empty target.

        n_best: return this many hypotheses with scores for each source, best first, instead of one text.
        batch: number of sources translated at once; sources of similar length are batched together.
        to: the script of the target, for a model that writes several scripts.
        long: "refuse" a source beyond the context, or "split" it into sentences.
        first_index: with a seed, source n is sampled with seed + first_index + n.
        """
        texts = [text] if isinstance(text, str) else list(text)
        how: dict[str, Any] = {"batch": batch, "to": to, "long": long, "first_index": first_index}
        hypotheses = translate_texts(self.loaded, texts, n_best=n_best, **how, **options)
        results = [row[0].text if n_best is None else row for row in hypotheses]
        return results[0] if isinstance(text, str) else results

    # -- prediction ---------------------------------------------------------------------------------------------------

    def classify(self, text: Any, *, top: int = 1, **options: Any) -> Any:
        """Return the `top` most probable classes of a text, a pair (text, text) or an image; a list gives a list.

        options: batch, the number of inputs processed at once; long="refuse", "cut" or "split", for texts beyond the
        context.
        """
        single = isinstance(text, str | tuple) or hasattr(text, "ndim")
        rows = [text] if single else list(text)
        predict: Any = predict_image_probabilities if self.tokenizer is None else predict_probabilities
        probabilities = predict(self.loaded, rows, **options) if rows else []
        predictions = [top_predictions(self.labels, row, top) for row in probabilities]
        return predictions[0] if single else predictions

    def tag(self, text: Any, *, split_punctuation: bool = True, **options: Any) -> Any:
        """Label every word of a text, and find its entities or restore its punctuation (see TaggedText).

        text: a text, or a list whose elements are texts or lists of words; a list gives a list of results.
        split_punctuation: treat punctuation marks as words; if False, words are separated by spaces only.
        """
        rows = [text] if isinstance(text, str) else list(text)
        words = [split_words(self.loaded, row, split_punctuation) for row in rows]
        tagged = tag_words(self.loaded, words, **options)
        return tagged[0] if isinstance(text, str) else tagged

    def fill(self, text: Any, *, top: int = 5, **options: Any) -> Any:
        """Fill each [MASK] of a text with its `top` most probable tokens (see FilledText); a list gives a list."""
        filled = fill_masks(self.loaded, [text] if isinstance(text, str) else list(text), top=top, **options)
        return filled[0] if isinstance(text, str) else filled

    def embed(self, text: Any, *, pooling: str | None = None, normalize: bool = True, **options: Any) -> torch.Tensor:
        """Return the embedding (D,) of a text or image, or (N, D) of a list of N.

        pooling: "mean" of the token vectors, or "cls", the vector of the first token; None: as stored with the model.
        normalize: scale embeddings to length one.
        """
        single = isinstance(text, str) or hasattr(text, "ndim")
        rows = [text] if single else list(text)
        embed: Any = embed_images if self.tokenizer is None else embed_texts
        vectors: torch.Tensor = embed(self.loaded, rows, pooling=pooling, normalize=normalize, **options)
        return vectors[0] if single else vectors

    def answer(self, question: Any, context: Any = None, *, n_best: int | None = None, **options: Any) -> Any:
        """Return the span of the text `context` that answers a question, "" for no answer.

        question, context: two strings, or two lists; or a list of pairs as `question`. Lists give a list.
        n_best: return this many spans with positions and probabilities, best first, instead of one text.
        options: longest (most tokens in an answer), impossible (whether "" is allowed), batch.
        """
        single = isinstance(question, str)
        if single:
            pairs = [(question, context)]
        else:
            pairs = list(question if context is None else zip(question, context, strict=True))
        spans = answer_questions(self.loaded, pairs, n_best=n_best or 1, **options) if pairs else []
        results = [row if n_best else row[0].text for row in spans]
        return results[0] if single else results
