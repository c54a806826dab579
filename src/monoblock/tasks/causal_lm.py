"""Causal language modeling: predict the next token of running text."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from monoblock.data.corpora.load import Corpus
from monoblock.metrics.text import bits_per_byte
from monoblock.recipes.schema import Recipe
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.task import Task, TrainingDefaults

if TYPE_CHECKING:
    from monoblock.data.batches import BatchIndices, BatchPlan
    from monoblock.tasks.loaded_model import LoadedModel
    from monoblock.tasks.task_data import TaskData, TaskInputs
    from monoblock.training.collate import TensorBatch

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

        from monoblock.data.batches import ContiguousBatchPlan
        from monoblock.tasks import running_text
        from monoblock.tasks.task_data import TaskData
        from monoblock.training.collate import TensorBatch, collate_causal_lm

        recipe, tokenizer, valid, special = inputs.recipe, inputs.text_tokenizer, inputs.valid, inputs.special_tokens
        context, seed = running_text.require_context(inputs.max_length), recipe.train.seed
        tokens = running_text.tokenize_corpus(inputs.train, tokenizer)
        blocks = running_text.build_blocks(inputs, tokens, context, recipe.data.packing)
        plan: BatchPlan = inputs.fixed_plan(len(blocks))
        is_contiguous = recipe.data.packing == "contiguous"
        if is_contiguous:
            running_text.check_contiguous(inputs)
            plan = ContiguousBatchPlan(len(blocks), inputs.samples_per_step)

        def build_batch(batch: BatchIndices) -> TensorBatch:
            samples = [blocks.sample(int(index), batch.epoch, seed) for index in batch.indices]
            tensors, labels = collate_causal_lm(samples, special)
            if isinstance(plan, ContiguousBatchPlan):
                indices = torch.from_numpy(batch.indices)
                tensors |= {"lanes": indices // plan.batches, "blocks": indices % plan.batches}
            return TensorBatch(tensors, labels, batch.epoch, batch.indices.tolist())

        num_validation, evaluation = 0, None
        options: dict[str, Any] = {}
        if valid is not None:
            validation = running_text.tokenize_corpus(valid, tokenizer)
            num_validation = len(validation)
            iterate = running_text.iterate_lanes if is_contiguous else running_text.iterate_windows
            evaluation = partial(iterate, validation, context, recipe.train.batch)
            options["bytes_per_token"] = running_text.count_bytes(valid) / num_validation
            options["baseline_losses"] = running_text.baseline_losses(tokens, validation)
        summary = f"{len(tokens):,} tokens to train on, {num_validation:,} to validate"
        return TaskData(tokenizer, special, plan, build_batch, evaluation, summary=summary, **options)

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest, /) -> Evaluation:
        """Compute the mean loss over all tokens but the first, in windows of `request.context` tokens.

        Windows begin `request.stride` tokens apart; by default they do not overlap.
        """
        from monoblock.tasks.batching import score_tokens
        from monoblock.tasks.running_text import count_bytes, iterate_windows, tokenize_corpus

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
