"""The names of the experiments, and what each compares; without torch, for the help of the command line."""

from __future__ import annotations

# Name -> (module in this folder with the constant EXPERIMENT, what is compared).
EXPERIMENTS: dict[str, tuple[str, str]] = {
    "positions": ("models.positions", "position schemes, tested beyond the training length"),
    "recurrence": ("models.recurrence", "a Transformer, and LSTMs with and without attention, on reversing strings"),
    "backtranslation": (
        "models.backtranslation",
        "translation from few pairs, without and with synthetic pairs from back-translation",
    ),
    "pretraining": (
        "models.pretraining",
        "a text-to-text task from few samples, without and with span-corruption pretraining",
    ),
}
