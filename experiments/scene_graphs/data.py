"""Scene graphs of many images: readers for VRD and for VG-SGG.h5, batches, and counts of the training relations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Graphs:
    """Boxes, classes and relations of all images, image by image; classes and predicates count from 0."""

    boxes: np.ndarray  # x1, y1, x2, y2
    labels: np.ndarray
    relations: np.ndarray  # subject and object, rows of `boxes`; predicate
    first_box: np.ndarray  # image i has the boxes from first_box[i] up to first_box[i + 1]
    first_relation: np.ndarray
    test: np.ndarray  # whether an image is one of the test images
    n_labels: int
    n_predicates: int
    vectors: np.ndarray | None = None  # word vectors of the object classes

    def images(self, test: bool) -> np.ndarray:
        """Return the images of a split that have a relation and, to train on, a pair of boxes."""
        used = (np.diff(self.first_relation) > 0) & (test | (np.diff(self.first_box) > 1))
        return np.flatnonzero(used & (self.test == test))

    def relation_rows(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each relation of `images` its image's place in the list, and its row."""
        return ragged(self.first_relation, images)

    def triplets(self, images: np.ndarray) -> np.ndarray:
        """Return the classes of subject and object, and the predicate, of each relation of `images`."""
        found = self.relations[self.relation_rows(images)[1]]
        return np.stack([self.labels[found[:, 0]], self.labels[found[:, 1]], found[:, 2]], 1)

    def padded_relations(self, images: np.ndarray) -> np.ndarray:
        """Return the relations of each image, padded with -1: the target of the recall."""
        image, row = self.relation_rows(images)
        count = np.bincount(image, minlength=len(images))
        target = np.full((len(images), count.max(initial=0), 3), -1)
        target[image, np.arange(len(row)) - (np.cumsum(count) - count)[image]] = self.relations[row]
        return target


def ragged(first: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each member of `groups` its group's place in the list, and its own number."""
    count = first[groups + 1] - first[groups]
    group = np.repeat(np.arange(len(groups)), count)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count) + first[groups][group]


def load(folder: Path) -> Graphs:
    """Read the data set of a folder: ``vrd.npz``, ``VG-SGG.h5``, or the arrays of that in ``VG-SGG.npz``."""
    if (folder / "vrd.npz").exists():
        with np.load(folder / "vrd.npz") as arrays:
            return from_vrd(arrays)
    if (folder / "VG-SGG.npz").exists():
        with np.load(folder / "VG-SGG.npz") as arrays:
            return from_visual_genome(dict(arrays))
    if (folder / "VG-SGG.h5").exists():
        try:
            import h5py
        except ImportError:
            raise SystemExit("VG-SGG.h5 is read with h5py, which is not installed: pip install h5py") from None
        with h5py.File(folder / "VG-SGG.h5", "r") as arrays:
            return from_visual_genome(arrays)
    raise SystemExit(f"{folder} holds neither vrd.npz nor VG-SGG.h5 or .npz; see the README.")


def from_vrd(arrays: Mapping[str, Any]) -> Graphs:
    """Read VRD (Lu et al., 2016) with its official split."""
    return Graphs(
        boxes=arrays["boxes"].astype(np.float32),
        labels=arrays["labels"].astype(np.int64),
        relations=arrays["rels"].astype(np.int64),
        first_box=arrays["first_box"].astype(np.int64),
        first_relation=arrays["first_rel"].astype(np.int64),
        test=arrays["split"] == 1,
        n_labels=len(arrays["obj_w2v"]),
        n_predicates=len(arrays["pred_w2v"]),
        vectors=arrays["obj_w2v"].astype(np.float32),
    )


def from_visual_genome(arrays: Mapping[str, Any]) -> Graphs:
    """Read the format of Xu et al.'s split of Visual Genome, whose classes and predicates count from 1.

    Boxes are centre and size, at a scale where the image's longer side is 1024. First and last rows of an image are
    inclusive, -1 where it has none.
    """
    first_box, box_rows = _spans(arrays["img_to_first_box"][:], arrays["img_to_last_box"][:])
    first_relation, relation_rows = _spans(arrays["img_to_first_rel"][:], arrays["img_to_last_rel"][:])
    centre = arrays["boxes_1024"][:][box_rows].astype(np.float32)
    corner = centre[:, :2] - centre[:, 2:] / 2
    place = np.full(len(arrays["boxes_1024"]), -1)
    place[box_rows] = np.arange(len(box_rows))
    ends = place[arrays["relationships"][:][relation_rows].astype(np.int64)]
    predicates = arrays["predicates"][:].reshape(-1)[relation_rows].astype(np.int64) - 1
    labels = arrays["labels"][:].reshape(-1)[box_rows].astype(np.int64) - 1
    return Graphs(
        boxes=np.concatenate([corner, corner + centre[:, 2:]], 1),
        labels=labels,
        relations=np.concatenate([ends, predicates[:, None]], 1),
        first_box=first_box,
        first_relation=first_relation,
        test=arrays["split"][:] == 2,
        n_labels=int(labels.max()) + 1,
        n_predicates=int(predicates.max()) + 1,
    )


def _spans(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets by image, and the rows of all images one after another."""
    count = np.where(first >= 0, last - first + 1, 0).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(count)])
    rows = np.arange(starts[-1]) - np.repeat(starts[:-1] - first, count)
    return starts, rows.astype(np.int64)


def tiny(seed: int = 0) -> Graphs:
    """Random images whose classes tell the predicate: enough to run every line."""
    rng = np.random.default_rng(seed)
    n_images, n_labels, n_predicates = 60, 5, 60
    count = rng.integers(2, 6, n_images)
    first_box = np.concatenate([[0], np.cumsum(count)])
    corner = rng.uniform(0, 50, (first_box[-1], 2))
    labels = rng.integers(0, n_labels, first_box[-1])
    relations, n_relations = [], []
    for start, n in zip(first_box, count, strict=False):
        pairs = [pair for pair in itertools.permutations(range(start, start + n), 2) if rng.random() < 0.6]
        found = [(s, o, (labels[s] + 2 * labels[o] + extra) % n_predicates) for s, o in pairs for extra in (0, 3)]
        relations += found
        n_relations.append(len(found))
    return Graphs(
        boxes=np.concatenate([corner, corner + rng.uniform(5, 50, corner.shape)], 1).astype(np.float32),
        labels=labels,
        relations=np.array(relations),
        first_box=first_box,
        first_relation=np.concatenate([[0], np.cumsum(n_relations)]),
        test=np.arange(n_images) >= 40,
        n_labels=n_labels,
        n_predicates=n_predicates,
    )


class Batch(NamedTuple):
    """Images of different sizes: objects padded to a rectangle, ordered pairs one after another."""

    objects: Tensor  # (images, most objects), rows of the boxes
    present: Tensor  # (images, most objects), False where padded
    pairs: Tensor  # (pairs, 2), rows of the boxes
    slots: Tensor  # (pairs, 2), places in the flattened `objects`
    image: Tensor  # (pairs,)
    place: Tensor  # (pairs,), number of the pair within its image
    ptr: Tensor  # (images + 1,)
    labels: Tensor  # (images, most relations), place * n_predicates + predicate, padded with -1
    one_each: Tensor  # (pairs,), one predicate of each pair at random; n_predicates where it has none


def batch_of(graphs: Graphs, images: np.ndarray, rng: np.random.Generator, most_pairs: int | None = None) -> Batch:
    """Make a batch of all ordered pairs; of an image with more than `most_pairs`, those with a relation and others."""
    n = graphs.first_box[images + 1] - graphs.first_box[images]
    in_image, box = ragged(graphs.first_box, images)
    slot = box - graphs.first_box[images][in_image]
    objects = np.zeros((len(images), n.max()), np.int64)
    present = np.zeros(objects.shape, bool)
    objects[in_image, slot], present[in_image, slot] = box, True

    start = np.concatenate([[0], np.cumsum(n * (n - 1))])
    image, place = ragged(start, np.arange(len(images)))
    place -= start[image]
    subject, other = place // (n[image] - 1), place % (n[image] - 1)
    other += other >= subject

    relation_image, row = graphs.relation_rows(images)
    ends = graphs.relations[row] - np.stack([graphs.first_box[images][relation_image]] * 2 + [0 * row], 1)
    ends, relation_image = ends[ends[:, 0] != ends[:, 1]], relation_image[ends[:, 0] != ends[:, 1]]
    pair = start[relation_image] + ends[:, 0] * (n[relation_image] - 1) + ends[:, 1] - (ends[:, 1] > ends[:, 0])

    if most_pairs is not None and (n * (n - 1)).max() > most_pairs:
        key = rng.random(len(image))
        key[pair] = -1
        order = np.lexsort((key, image))
        kept = np.sort(order[np.arange(len(image)) - start[image] < most_pairs])
        compact = np.full(len(image), -1)
        compact[kept] = np.arange(len(kept))
        inside = compact[pair] >= 0
        pair, relation_image, ends = compact[pair[inside]], relation_image[inside], ends[inside]
        image, subject, other = image[kept], subject[kept], other[kept]
        start = np.concatenate([[0], np.cumsum(np.bincount(image, minlength=len(images)))])
        place = np.arange(len(image)) - start[image]

    one_each = np.full(len(image), graphs.n_predicates)
    shuffled = rng.permutation(len(pair))
    one_each[pair[shuffled]] = ends[shuffled, 2]
    first = graphs.first_box[images][image]
    slots = np.stack([subject, other], 1) + (image * n.max())[:, None]
    pairs = np.stack([subject + first, other + first], 1)
    labels = _padded_labels(relation_image, place[pair] * graphs.n_predicates + ends[:, 2], len(images))
    arrays = (objects, present, pairs, slots, image, place, start, labels, one_each)
    return Batch(*(torch.from_numpy(a) for a in arrays))


def _padded_labels(image: np.ndarray, label: np.ndarray, n_images: int) -> np.ndarray:
    """List the labels of each image, each once."""
    most = label.max(initial=0) + 1
    image, label = np.divmod(np.unique(image * most + label), most)
    count = np.bincount(image, minlength=n_images)
    found = np.full((n_images, max(1, count.max(initial=0))), -1)
    found[image, np.arange(len(label)) - (np.cumsum(count) - count)[image]] = label
    return found


def chunks(graphs: Graphs, images: np.ndarray, most_pairs: int) -> Iterator[np.ndarray]:
    """Cut a list of images into parts of about `most_pairs` pairs."""
    n = graphs.first_box[images + 1] - graphs.first_box[images]
    part = np.cumsum(n * (n - 1)) // most_pairs
    for number in np.unique(part):
        yield images[part == number]


def frequencies(graphs: Graphs, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count for two classes their relations by predicate, and all ordered pairs of them."""
    relations = np.zeros((graphs.n_labels, graphs.n_labels, graphs.n_predicates))
    np.add.at(relations, tuple(graphs.triplets(images).T), 1)
    pairs = np.zeros((graphs.n_labels, graphs.n_labels))
    for part in chunks(graphs, images, 1_000_000):
        rows = batch_of(graphs, part, np.random.default_rng(0)).pairs.numpy()
        np.add.at(pairs, (graphs.labels[rows[:, 0]], graphs.labels[rows[:, 1]]), 1)
    return relations, pairs
