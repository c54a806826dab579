"""The recipe section [classification]: how training images are augmented."""

from __future__ import annotations

from dataclasses import dataclass

from monoblock.config.schema import check_at_least, check_fraction, check_types


@dataclass(frozen=True, kw_only=True)
class AugmentSection:
    """How training images are augmented, differently in every epoch; with 0, an augmentation is not applied."""

    shift: int = 0  # shift each image by up to this many pixels in both directions, and fill the gap with zeros
    rotate: float = 0.0  # rotate each image by up to this many degrees
    zoom: float = 0.0  # enlarge or shrink each image by up to this fraction of its size
    flip: float = 0.0  # mirror each image horizontally with this probability
    cutout: int = 0  # set a random square of this many pixels on each side to zero

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "shift", "rotate", "cutout")
        check_fraction(self, "zoom", "flip")


@dataclass(frozen=True, kw_only=True)
class ClassificationSection:
    """A table of its own says how training images are augmented; for texts there is nothing to set."""

    augment: AugmentSection = AugmentSection()  # how training images are augmented

    def __post_init__(self) -> None:
        check_types(self)
