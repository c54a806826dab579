"""Small recipes, one for each kind of model, for tests that train in several processes."""

from training_support import MASKED_LM_RECIPE, SEQ2SEQ_RECIPE, merge_recipes

EXACT = {
    "model": {"dropout": 0.0},
    "train": {"accumulate": 2, "eval_batches": 3},
}
# Neither the vocabulary nor the heads and hidden sizes can be divided among two processes.
FAMILIES = {
    "gpt": {},
    "llama": {
        "model": {"family": "llama", "width": 24, "depth": 2, "heads": 3, "kv_heads": 1, "hidden": 35, "context": 13}
    },
    "t5": merge_recipes(
        SEQ2SEQ_RECIPE,
        {"model": {"family": "t5", "width": 21, "depth": 2, "heads": 3, "hidden": 35, "context": 47}},
        {"tokenizer": {"dropout": 0.0}, "train": {"schedule": "cosine"}},
    ),
    "bert": merge_recipes(MASKED_LM_RECIPE, {"model": {"depth": 2}}),
    "rotary": {
        "model": {
            "family": "llama",
            "width": 24,
            "depth": 2,
            "heads": 4,
            "kv_heads": 2,
            "context": 13,
            "qk_norm": True,
            "bias": True,
        }
    },
    "alibi": {"model": {"family": "gpt", "width": 24, "depth": 2, "heads": 4, "context": 13, "positions": "alibi"}},
    "divisible": merge_recipes(  # heads and hidden units, but not the vocabulary; fewer key/value heads than processes
        SEQ2SEQ_RECIPE,
        {"model": {"family": "t5", "width": 24, "depth": 2, "heads": 4, "kv_heads": 1, "hidden": 34, "context": 47}},
        {"tokenizer": {"dropout": 0.0}, "train": {"optimizer": "muon", "schedule": "cosine"}},
    ),
    "experts": {
        "model": {
            "family": "llama",
            "width": 24,
            "depth": 2,
            "heads": 3,
            "hidden": 18,
            "context": 13,
            "bias": True,
            "experts": 3,
            "top_k": 2,
        },
        # Load balancing counts the tokens of a micro-batch, so each must have the same rows in one process and in two.
        "train": {"ema": 0.9, "batch": 6},
    },
}
