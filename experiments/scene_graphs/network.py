"""A relation network on boxes and classes: context over the image's objects, then one small network for each pair."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.scene_graphs.data import Batch


def object_geometry(boxes: Tensor, scale: Tensor) -> Tensor:
    """Return corners, width, height and root area of boxes, as shares of the scale."""
    corners = boxes / scale
    size = corners[..., 2:] - corners[..., :2]
    return torch.cat([corners, size, size.prod(-1, keepdim=True).clamp(min=0).sqrt()], -1)


def pair_geometry(subject: Tensor, other: Tensor) -> Tensor:
    """Return where the object lies as seen from the subject, their relative sizes and overlap."""
    size_s, size_o = (box[..., 2:] - box[..., :2] + 1 for box in (subject, other))
    shift = (other[..., :2] + other[..., 2:] - subject[..., :2] - subject[..., 2:]) / 2
    area_s, area_o = size_s.prod(-1, keepdim=True), size_o.prod(-1, keepdim=True)
    inner = torch.minimum(subject[..., 2:], other[..., 2:]) - torch.maximum(subject[..., :2], other[..., :2]) + 1
    shared = inner.clamp(min=0).prod(-1, keepdim=True)
    near = shift / (size_s + size_o)
    ratio = (size_o / size_s).log()
    overlap = torch.cat([shared / (area_s + area_o - shared), shared / area_s, shared / area_o], -1)
    gap = (inner / torch.minimum(size_s, size_o)).clamp(-4, 1)
    return torch.cat([near, near.abs(), near.square().sum(-1, keepdim=True).sqrt(), ratio, overlap, gap], -1)


class RelationNetwork(nn.Module):
    """Scores of all predicates, and of "no relation" in the last column, for each pair of a batch.

    As in Neural Motifs (Zellers et al., 2018), the scores start from the log-frequencies of the training relations of
    two classes; they are trained along.
    """

    def __init__(
        self,
        boxes: Tensor,
        labels: Tensor,
        prior: Tensor,
        vectors: np.ndarray | None = None,
        *,
        width: int = 128,
        hidden: int = 256,
        layers: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        n_labels, _, n_scores = prior.shape
        self.boxes, self.labels = boxes, labels
        self.name = nn.Embedding(n_labels, width)
        self.word = None
        if vectors is not None:
            self.word = nn.Sequential(
                nn.Embedding.from_pretrained(torch.from_numpy(vectors)), nn.Linear(vectors.shape[1], width)
            )
        self.box = nn.Sequential(nn.Linear(7, width), nn.GELU(), nn.Linear(width, width))
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, F.gelu, batch_first=True, norm_first=True)
        self.context = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.subject, self.object = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.geometry = nn.Sequential(nn.Linear(12, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.out = nn.Sequential(nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, n_scores))
        self.prior = nn.Embedding.from_pretrained(prior.flatten(0, 1).float(), freeze=False)

    def forward(self, batch: Batch) -> Tensor:
        labels = self.labels[batch.objects]
        boxes = self.boxes[batch.objects]
        scale = (boxes[..., 2:].amax(-1) * batch.present).amax(-1)[:, None, None].clamp(min=1)
        tokens = self.name(labels) + self.box(object_geometry(boxes, scale))
        if self.word is not None:
            tokens = tokens + self.word(labels)
        context = self.context(tokens, src_key_padding_mask=~batch.present).flatten(0, 1)
        left, right = batch.slots.unbind(-1)
        geometry = self.geometry(pair_geometry(*self.boxes[batch.pairs].unbind(-2)))
        joint = self.subject(context).index_select(0, left) + self.object(context).index_select(0, right) + geometry
        ends = self.labels[batch.pairs]
        return self.out(joint) + self.prior(ends[:, 0] * self.name.num_embeddings + ends[:, 1])
