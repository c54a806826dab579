"""Causal language modeling: predict the next token of running text."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from monoblock.config.model import ModelConfig
from monoblock.data.corpora.load import Corpus
from monoblock.errors import ConfigError
from monoblock.metrics.text import bits_per_byte
from monoblock.recipes.schema import Recipe
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.task import Task, TrainingDefaults

if TYPE_CHECKING:
    from monoblock.tasks.loaded_model import LoadedModel
    from monoblock.tasks.task_data import TaskData, TaskInputs

DEFAULT_CONTEXT = 256  # tokens in a window, for models without a maximum context


class CausalLM(Task):
    name = "causal_lm"
    about = "predict the next token of running text"
    corpus_kinds = ("text", "tokens")
    metrics = ("loss", "perplexity", "bits_per_byte")
    decoding = "sampling"
    verb = "generate"
    supports_subword_sampling = True
    defaults = TrainingDefaults(1, 8, 512)

    def special_tokens(self, recipe: Recipe, train: Corpus, /) -> list[str]:
        return ["eos"] if len(train) > 1 else []  # a single text needs no end token

    def data(self, inputs: TaskInputs, /) -> TaskData:
        """Build blocks of running text, in which the label of a token is the next token."""
        import torch

        from monoblock.data import batches as plans
        from monoblock.tasks import task_data as text
        from monoblock.training.collate import TensorBatch, collate_causal_lm

        recipe, tokenizer, valid, special = inputs.recipe, inputs.text_tokenizer, inputs.valid, inputs.special_tokens
        context, section = text.require_context(inputs.max_length), recipe.train
        is_contiguous = recipe.data.packing == "contiguous"
        if is_contiguous and isinstance(inputs.config, ModelConfig):
            raise ConfigError(
                "data.packing=contiguous carries the state of an LSTM, which a Transformer does not have; write "
                "data.packing=stream, or model.family=lstm"
            )
        if is_contiguous and (inputs.sampler is not None or section.adversarial):
            raise ConfigError(
                "data.packing=contiguous cannot be used with tokenizer.dropout, tokenizer.alpha or train.adversarial; "
                "leave them out, or write data.packing=stream"
            )
        tokens = text.tokenize_corpus(inputs.train, tokenizer)
        blocks = text.build_blocks(inputs, tokens, context, recipe.data.packing)
        plan: plans.BatchPlan = inputs.fixed_plan(len(blocks))
        if is_contiguous:
            plan = plans.ContiguousBatchPlan(len(blocks), inputs.samples_per_step)

        def build_batch(batch: plans.BatchIndices) -> TensorBatch:
            samples = [blocks.sample(int(index), batch.epoch, section.seed) for index in batch.indices]
            tensors, labels = collate_causal_lm(samples, special)
            if isinstance(plan, plans.ContiguousBatchPlan):
                indices = torch.from_numpy(batch.indices)
                tensors |= {"lanes": indices // plan.batches, "blocks": indices % plan.batches}
            return TensorBatch(tensors, labels, batch.epoch, batch.indices.tolist())

        num_validation, evaluation = 0, None
        facts: dict[str, Any] = {}
        if valid is not None:
            validation = text.tokenize_corpus(valid, tokenizer)
            num_validation = len(validation)
            iterate = text.iterate_lanes if is_contiguous else text.iterate_windows
            evaluation = partial(iterate, validation, context, section.batch)
            facts["bytes_per_token"] = text.count_bytes(valid) / num_validation
            # The losses of a uniform and of a unigram distribution, in nats per token.
            unigram = text.unigram_loss(tokens, validation)
            facts["baseline_losses"] = {"uniform": math.log(tokens.vocab), "unigram": unigram}
        summary = f"{len(tokens):,} tokens to train on, {num_validation:,} to validate"
        return text.TaskData(tokenizer, special, plan, build_batch, evaluation, summary=summary, **facts)

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest, /) -> Evaluation:
        """Compute the mean loss over all tokens but the first, in windows of `request.context` tokens.

        Windows begin `request.stride` tokens apart; by default they do not overlap.
        """
        from monoblock.tasks.batching import score_tokens
        from monoblock.tasks.task_data import count_bytes, iterate_windows, tokenize_corpus

        corpus = read_corpus(request, self.corpus_kinds)
        context = request.context or loaded.model.config.context or DEFAULT_CONTEXT
        tokens = tokenize_corpus(corpus, loaded.tokenizer)
        batches = iterate_windows(tokens, context, max(1, request.batch_size // 8), request.stride)
        scores = score_tokens(loaded, batches)
        metrics = {
            "loss": scores["loss"],
            "perplexity": scores["perplexity"],
            "bits_per_byte": bits_per_byte(scores["loss"], len(tokens), count_bytes(corpus)),
            "tokens": scores["tokens"],
            "split": corpus.split,
        }
        return Evaluation(metrics)
