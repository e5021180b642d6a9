"""One threshold per row: its search in plain torch, the choice of an implementation, and what autograd needs."""

from lastlayer._threshold import operators  # noqa: F401  (registers them)
