"""The names of the experiments, and what each compares; without torch, for the help of the command line."""

from __future__ import annotations

# Name -> (module in this folder with the constant EXPERIMENT, what is compared).
EXPERIMENTS: dict[str, tuple[str, str]] = {
    "norm-placement": ("models.norm_placement", "pre-, post- and sandwich norm, with and without warm-up, by depth"),
    "residuals": ("models.residuals", "24 layers with and without residual connections"),
    "components": ("models.components", "one part of the block removed at a time"),
    "positions": ("models.positions", "position schemes, tested beyond the training length"),
    "heads": ("models.heads", "1 to 64 attention heads at equal width"),
    "depth-width": ("models.depth_width", "deep and narrow against shallow and wide"),
    "feedforward": ("models.feedforward", "activations, gates and hidden sizes of the feed-forward network"),
    "norms": ("models.norms", "LayerNorm, RMSNorm and BatchNorm on texts of different lengths"),
    "swaps": ("models.swaps", "from the block of 2017 to that of LLaMA, one swap at a time"),
    "tying": ("models.tying", "one matrix for embedding and output, or two"),
    "smoothing": ("models.smoothing", "label smoothing, by perplexity and by BLEU"),
    "scaling-law": ("models.scaling_law", "six sizes, and the exponent of their losses"),
    "scale": ("costs.scale", "the softmax with and without the scale of the scores, by head size"),
    "attention-memory": ("costs.attention_memory", "plain and fused attention: bytes and time by length"),
    "kv-cache": ("costs.kv_cache", "decoding with and without a cache: positions, time and bytes"),
    "sparse": ("costs.sparse", "full, window, Longformer, BigBird and linear attention: time and bytes by length"),
    "speculative": ("costs.speculative", "greedy decoding alone, with a trained draft, and with lookup"),
    "recurrence": ("models.recurrence", "a Transformer, and LSTMs with and without attention, on reversing strings"),
    "language-models": (
        "models.language_models",
        "a Transformer and an LSTM, both tuned, on equal tokens or equal time",
    ),
    "backtranslation": ("models.backtranslation", "synthetic pairs: how they are made, and their share"),
    "pretraining": ("models.pretraining", "a task from few samples, without and with span-corruption pretraining"),
}
