"""Print which token each head of each layer attends to most.

python attention.py RUN_FOLDER TEXT
"""

import sys

import torch

import monoblock as mb

if __name__ == "__main__":
    folder, text = sys.argv[1:]
    pipe = mb.load(folder)
    ids = pipe.tokenizer.encode(text)
    tokens = [pipe.tokenizer.decode([token]).strip() for token in ids]
    trace = mb.trace(pipe.model, torch.tensor([ids]), names="decoder.*.attention.weights")
    for name, weights in trace.items():  # weights: (batch, head, query, key)
        for head, rows in enumerate(weights[0]):
            best = [f"{token}→{tokens[row.argmax()]} {row.max():.0%}" for token, row in zip(tokens, rows, strict=True)]
            print(f"layer {name.split('.')[1]}, head {head}:", ", ".join(best))
