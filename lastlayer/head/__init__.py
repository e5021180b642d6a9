"""Heads: modules with a state of their own, from features to logits."""

from lastlayer.head.attentive_pool import AttentivePoolHead, attentive_pool
from lastlayer.head.prototype import PrototypeHead, ReciprocalPointHead
from lastlayer.head.quasibinary import QuasibinaryHead
from lastlayer.head.sharded import ShardedLinear
from lastlayer.head.sphere import SphericalHead

__all__ = [
    "AttentivePoolHead",
    "PrototypeHead",
    "QuasibinaryHead",
    "ReciprocalPointHead",
    "ShardedLinear",
    "SphericalHead",
    "attentive_pool",
]
