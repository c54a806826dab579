"""Print which token each head of each layer attends to most, as `token→attended token share`.

python attention.py RUN_FOLDER TEXT

A token of a decoder can attend to itself and to earlier tokens only, so the first token attends to itself. Tokens are
numbered, since a text may contain one twice; a tokenizer with a small vocabulary splits rare words into several tokens.
"""

import sys

import torch

import monoblock as mb


def main(folder: str, text: str) -> None:
    pipe = mb.load(folder)
    ids = pipe.tokenizer.encode(text)
    tokens = [f"{number} {pipe.tokenizer.decode([token]).strip()!r}" for number, token in enumerate(ids)]
    print("tokens:", ", ".join(tokens))
    trace = mb.trace(pipe.model, torch.tensor([ids]), names="decoder.*.attention.weights")
    for name, weights in trace.items():  # weights: (batch, head, query, key)
        print(f"\nlayer {name.split('.')[1]}")
        for head, rows in enumerate(weights[0]):
            pairs = [f"{query}→{int(row.argmax())} {row.max():.0%}" for query, row in enumerate(rows)]
            print(f"  head {head}: ", "  ".join(pairs))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
