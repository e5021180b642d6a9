"""Decoders: from scores to label sets, and the thresholds they need."""

from lastlayer.decode.graph import DecodeGraph, decode_graph
from lastlayer.decode.recall import tune_recall
from lastlayer.decode.reject import DecodeReject, decode_reject, tune_reject
from lastlayer.decode.suggest import LabelSuggestions, Suggestion, suggest_labels
from lastlayer.decode.threshold import DecodeThreshold, decode_threshold, tune_thresholds
from lastlayer.decode.top_k import Decoded, DecodeTopK, decode_top_k
from lastlayer.decode.tree import DecodeTree, decode_tree, tune_darts

__all__ = [
    "DecodeGraph",
    "DecodeReject",
    "DecodeThreshold",
    "DecodeTopK",
    "DecodeTree",
    "Decoded",
    "LabelSuggestions",
    "Suggestion",
    "decode_graph",
    "decode_reject",
    "decode_threshold",
    "decode_top_k",
    "decode_tree",
    "suggest_labels",
    "tune_darts",
    "tune_recall",
    "tune_reject",
    "tune_thresholds",
]
