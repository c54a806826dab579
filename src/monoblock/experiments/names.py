"""The experiments by name; without torch, for the help of the command line."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from monoblock.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from monoblock.experiments.frame.experiment import Experiment

# Name -> (module in this folder that holds the Experiment of this name, what is compared).
EXPERIMENTS: dict[str, tuple[str, str]] = {
    "norm-placement": ("depth", "pre-, post- and sandwich norm, with and without warm-up, by depth"),
    "residuals": ("depth", "24 layers with and without residual connections"),
    "components": ("blocks", "one part of the block removed at a time"),
    "positions": ("positions", "position schemes, tested beyond the training length"),
    "heads": ("blocks", "1 to 64 attention heads at equal width"),
    "depth-width": ("blocks", "deep and narrow against shallow and wide"),
    "feedforward": ("blocks", "activations, gates and hidden sizes of the feed-forward network"),
    "norms": ("norms", "LayerNorm, RMSNorm and BatchNorm on texts of different lengths"),
    "swaps": ("blocks", "from the block of 2017 to that of LLaMA, one swap at a time"),
    "tying": ("blocks", "one matrix for embedding and output, or two"),
    "smoothing": ("translation", "label smoothing, by perplexity and by BLEU"),
    "scaling-law": ("blocks", "six sizes, and the exponent of their losses"),
    "scale": ("attention", "the softmax with and without the scale of the scores, by head size"),
    "attention-memory": ("attention", "plain and fused attention: bytes and time by length"),
    "kv-cache": ("decoding", "decoding with and without a cache: positions, time and bytes"),
    "sparse": ("attention", "full, window, Longformer, BigBird and linear attention: time and bytes by length"),
    "speculative": ("decoding", "greedy decoding alone, with a trained draft, and with lookup"),
    "recurrence": ("recurrence", "a Transformer, and LSTMs with and without attention, on reversing strings"),
    "language-models": (
        "language_models",
        "a Transformer and an LSTM, both tuned, on equal tokens or equal time",
    ),
    "backtranslation": ("translation", "synthetic pairs: how they are made, and their share"),
    "pretraining": ("pretraining", "a task from few samples, without and with span-corruption pretraining"),
}


def load_experiment(name: str) -> Experiment:
    """Return the experiment of this name from its module."""
    if name not in EXPERIMENTS:
        advice = did_you_mean(name, EXPERIMENTS)
        raise ConfigError(f"there is no experiment {name!r}; monoblock compare --help lists them{advice}")
    module = import_module(f"monoblock.experiments.{EXPERIMENTS[name][0]}")
    found: Experiment = next(value for value in vars(module).values() if getattr(value, "name", None) == name)
    return found
