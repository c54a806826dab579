"""Which objectives are trained on running text."""


def trains_on_running_text(objective: str, packing: str) -> bool:
    """Return whether an objective is trained on blocks of one stream of tokens rather than on separate texts."""
    return objective in ("causal_lm", "span_corruption") or (objective, packing) == ("masked_lm", "stream")
