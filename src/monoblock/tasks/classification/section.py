"""The recipe section [classification]: augmentation of training images."""

from __future__ import annotations

from dataclasses import dataclass

from monoblock.config.schema import check_at_least, check_fraction, check_types


@dataclass(frozen=True, kw_only=True)
class AugmentSection:
    """Augmentation of training images, with new random numbers in every epoch; off by default."""

    shift: int = 0  # by up to this many pixels in each direction, filled with zeros
    rotate: float = 0.0  # by up to this many degrees
    zoom: float = 0.0  # by up to this fraction of the size
    flip: float = 0.0  # probability of a horizontal flip
    cutout: int = 0  # side in pixels of a square that is set to zero

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "shift", "rotate", "cutout")
        check_fraction(self, "zoom", "flip")


@dataclass(frozen=True, kw_only=True)
class ClassificationSection:
    augment: AugmentSection = AugmentSection()  # images

    def __post_init__(self) -> None:
        check_types(self)
