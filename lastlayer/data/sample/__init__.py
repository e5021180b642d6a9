"""The sample that ships with the package: Debian package descriptions and their tags."""

from __future__ import annotations

from pathlib import Path

from lastlayer.data.labeldata import LabelData

PATH = Path(__file__).parent / "debian.jsonl.xz"


def load_sample() -> dict[str, LabelData]:
    """Return the parts "train", "valid" and "test" of the sample; README.md beside it says where it comes from.

    Example:
        >>> from lastlayer.data import load_sample
        >>> sorted(load_sample())
        ['test', 'train', 'valid']
    """
    from lastlayer.data.read import read_parts

    return read_parts(PATH)
