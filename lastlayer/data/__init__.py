"""Rows with label lists: readers of files, hiding of labels, splits, and the sample that comes with the package."""

from lastlayer.data.labeldata import LabelData
from lastlayer.data.prepare import hide_labels, single_positive
from lastlayer.data.read import FORMATS, read, read_parts, stream
from lastlayer.data.sample import load_sample
from lastlayer.data.source import DataError, Limits
from lastlayer.data.splits import fold_rows, split_rows

__all__ = [
    "FORMATS",
    "DataError",
    "LabelData",
    "Limits",
    "fold_rows",
    "hide_labels",
    "load_sample",
    "read",
    "read_parts",
    "single_positive",
    "split_rows",
    "stream",
]
