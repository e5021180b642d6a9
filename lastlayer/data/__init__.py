"""Files to rows with label lists: readers, hiding of labels, splits, and the sample that ships with the package."""

from lastlayer.data.labeldata import LabelData as LabelData
from lastlayer.data.prepare import hide_labels as hide_labels
from lastlayer.data.prepare import single_positive as single_positive
from lastlayer.data.read import FORMATS as FORMATS
from lastlayer.data.read import read as read
from lastlayer.data.read import read_parts as read_parts
from lastlayer.data.read import stream as stream
from lastlayer.data.sample import load_sample as load_sample
from lastlayer.data.source import DataError as DataError
from lastlayer.data.source import Limits as Limits
from lastlayer.data.splits import fold_rows as fold_rows
from lastlayer.data.splits import split_rows as split_rows
