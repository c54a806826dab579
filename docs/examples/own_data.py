"""Data of your own: any iterable of batches (inputs, labels). Here, the model learns to add two digits.

python own_data.py RUN_FOLDER
"""

import sys
from collections.abc import Iterator

import torch

import monoblock as mb
from monoblock.runs.build_data import Batch


class Additions:
    """Batches of rows a, b, sum; only the sum is a label."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            a, b = torch.randint(10, (2, 64), generator=generator)
            labels = torch.stack((torch.full_like(a, -100), a + b), 1)
            yield {"source": torch.stack((a, b), 1)}, labels


if __name__ == "__main__":
    recipe = {
        "model": {"family": "gpt", "vocab": 20, "width": 64, "depth": 2, "heads": 4, "context": 8},
        "train": {"steps": 400, "lr": 3e-3, "warmup": 20, "eval_every": 0},
    }
    losses: list[float] = []
    run = mb.train(
        recipe,
        batches=Additions(1, 400),
        validation_batches=list(Additions(2, 4)),
        out=sys.argv[1],
        optimizer=lambda model: torch.optim.NAdam(model.parameters()),
        callbacks=[lambda event: losses.append(getattr(event, "loss", 0.0))],
    )
    model = mb.Transformer.from_pretrained(sys.argv[1])
    print(len(losses), mb.evaluate(model, Additions(3, 10))["accuracy"])
