"""A block of your own: its output is scaled by a learned factor (LayerScale, Touvron et al. 2021).

python own_block.py RUN_FOLDER
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

import monoblock as mb


class ScaledBlock(mb.Block):
    def __init__(self, config: mb.BlockConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.full((config.width,), 0.1))

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        return x + self.scale * (super().forward(x, *args, **options) - x)


class ScaledTransformer(mb.Transformer):
    block_class = ScaledBlock


if __name__ == "__main__":
    run = mb.train("demo", {"train.steps": 20}, model_class=ScaledTransformer, out=sys.argv[1])
    print(sum(name.endswith(".scale") for name, _ in run.model.named_parameters()), "factors")
    pipe = mb.load(sys.argv[1], model_class=ScaledTransformer)
    print(pipe.generate("the", max_new_tokens=20))
