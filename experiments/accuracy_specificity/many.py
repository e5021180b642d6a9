"""Multi-label sets with a natural tree: nodes by the negation rule, several per row."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import lastlayer as ll
from experiments import common
from experiments.accuracy_specificity import curves
from lastlayer import LabelTree

SETS = ("goemotions", "debian_tags", "voc12_animals")
TREES = {
    "presence": "Ward, prototypes of presence",
    "difference": "Ward, presence minus absence",
    "natural": "natural tree",
    "shuffled": "Ward tree, classes shuffled",
}
NODES = (1, 3, 5)
FEATURES, VOCABULARY, EPOCHS, BATCH = 64, 20000, 6, 256
LEAST_ROWS = 20  # training rows that a label needs
VOC_GROUPS = {
    "animal": ("bird", "cat", "cow", "dog", "horse", "sheep"),
    "vehicle": ("aeroplane", "bicycle", "boat", "bus", "car", "motorbike", "train"),
    "indoor": ("bottle", "chair", "diningtable", "pottedplant", "sofa", "tvmonitor"),
    "human": ("person",),
}


class Rows(NamedTuple):
    x: Any  # feature vectors, or a list of word lists
    y: Tensor  # multi-hot


class Set(NamedTuple):
    train: Rows
    test: Rows
    groups: list[str]  # the group of each label in the natural tree


def load(folder: Path | None, name: str) -> Set:
    if name == "tiny":
        return tiny()
    if folder is None:
        raise SystemExit("--labels is needed: the folder of the multi-label sets (or --parts train curves)")
    readers = {"goemotions": goemotions, "debian_tags": debian_tags, "voc12_animals": voc12_animals}
    return readers[name](folder / name)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def goemotions(folder: Path) -> Set:
    names = (folder / "emotions.txt").read_text().split()
    mapping = json.loads((folder / "ekman_mapping.json").read_text())
    group_of = {name: group for group, members in mapping.items() for name in members}

    def rows(part: str) -> Rows:
        with lzma.open(folder / f"{part}.tsv.xz", "rt", encoding="utf8") as file:
            fields = [line.rstrip("\n").split("\t") for line in file]
        return Rows([words(f[0]) for f in fields], multi_hot([f[1].split(",") for f in fields], len(names)))

    return frequent(Set(rows("train"), rows("test"), [group_of.get(name, name) for name in names]))


def debian_tags(folder: Path) -> Set:
    """Packages with tags; those of one source package are all in one part."""
    with lzma.open(folder / "debian_bookworm.jsonl.xz", "rt", encoding="utf8") as file:
        packages = [p for line in file if (p := json.loads(line))["tags"]]
    names = sorted({tag for p in packages for tag in p["tags"]})
    place = {name: i for i, name in enumerate(names)}
    target = multi_hot([[place[tag] for tag in p["tags"]] for p in packages], len(names))
    texts = [words(f"{p['name']} {p['short']} {p['long']}") for p in packages]
    tested = [int(hashlib.md5(p["source"].encode()).hexdigest(), 16) % 5 == 0 for p in packages]
    train, test = (
        Rows([t for t, b in zip(texts, tested, strict=True) if b is part], target[torch.tensor(tested) == part])
        for part in (False, True)
    )
    return frequent(Set(train, test, [name.split("::")[0] for name in names]))


def voc12_animals(folder: Path) -> Set:
    with np.load(folder / "voc12_animals_effnet_lite0.npz", allow_pickle=False) as z:
        x = torch.from_numpy(z["F"] * z["scale"] + z["lo"]).float()
        names = z["labels"].tolist()
        y = torch.from_numpy(np.unpackbits(z["Y"], axis=1)[:, : len(names)])
        tested = torch.from_numpy(z["is_test"])
    x = (x - x[~tested].mean(0)) / (x[~tested].std(0) + 1e-6)
    group_of = {name: group for group, members in VOC_GROUPS.items() for name in members}
    return frequent(Set(Rows(x[~tested], y[~tested]), Rows(x[tested], y[tested]), [group_of[name] for name in names]))


def tiny() -> Set:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, generator=generator)
    y = (x @ torch.randn(8, 12, generator=generator) > 2).to(torch.uint8)
    return Set(Rows(x[:300], y[:300]), Rows(x[300:], y[300:]), [str(i // 4) for i in range(12)])


def multi_hot(lists: list[list[Any]], n: int) -> Tensor:
    y = torch.zeros(len(lists), n, dtype=torch.uint8)
    for row, labels in zip(y, lists, strict=True):
        row[[int(label) for label in labels]] = 1
    return y


def frequent(data: Set) -> Set:
    """Leave out labels with few training rows."""
    kept = data.train.y.sum(0) >= LEAST_ROWS
    groups = [group for group, keep in zip(data.groups, kept.tolist(), strict=True) if keep]
    return Set(data.train._replace(y=data.train.y[:, kept]), data.test._replace(y=data.test.y[:, kept]), groups)


class Words(nn.Module):
    """The mean of word vectors, each word weighted by how rare it is, after a layer of normalisation."""

    def __init__(self, texts: list[list[str]]) -> None:
        super().__init__()
        counts = Counter(word for text in texts for word in set(text))
        common_words = [word for word, count in counts.most_common(VOCABULARY) if count > 2]
        self.place = {word: i for i, word in enumerate(common_words)}
        self.rarity = torch.tensor([np.log(len(texts) / counts[word]) for word in common_words]).float()
        self.table = nn.EmbeddingBag(len(common_words), FEATURES, mode="sum")
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, texts: list[list[str]]) -> Tensor:
        places = [sorted({self.place[word] for word in text if word in self.place}) for text in texts]
        flat = torch.tensor([p for row in places for p in row], dtype=torch.long)
        starts = torch.tensor([0, *np.cumsum([len(row) for row in places])[:-1].tolist()])
        weight = self.rarity[flat]
        length = torch.zeros(len(texts)).index_add_(
            0, torch.repeat_interleave(torch.arange(len(texts)), torch.tensor([len(row) for row in places])), weight**2
        )
        size = torch.repeat_interleave(length.sqrt().clamp(min=1e-6), torch.tensor([len(row) for row in places]))
        return self.norm(self.table(flat, starts, per_sample_weights=weight / size))


def fitted(data: Set, seed: int, epochs: int) -> tuple[nn.Module, ll.PrototypeHead]:
    """Features of 64 numbers and two prototypes per label, trained together."""
    torch.manual_seed(seed)
    x, y = data.train
    vectors = isinstance(x, Tensor)
    body: nn.Module = (
        nn.Sequential(nn.Dropout(0.5), nn.Linear(x.shape[1], FEATURES), nn.BatchNorm1d(FEATURES))
        if vectors
        else Words(x)
    )
    head = ll.PrototypeHead(FEATURES, y.shape[1], multilabel=True)
    optimiser = torch.optim.Adam([*body.parameters(), *head.parameters()], 0.005)
    steps = epochs * max(1, len(y) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.005, total_steps=steps + 1)
    for step in range(steps):
        if step % max(1, len(y) // BATCH) == 0:
            order = torch.randperm(len(y))
        at = order[step * BATCH % max(1, len(y) // BATCH * BATCH) :][:BATCH]
        loss = head.loss(body(x[at] if vectors else [x[i] for i in at.tolist()]), y[at])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
    return body.eval(), head.eval()


def group_tree(groups: list[str]) -> LabelTree:
    """The labels under their groups under a root; a group of one label is that label."""
    names = [group for group, count in Counter(groups).items() if count > 1]
    n, root = len(groups), len(groups) + len(names)
    place = {name: n + i for i, name in enumerate(names)}
    return LabelTree.from_parents([place.get(group, root) for group in groups] + [root] * len(names) + [-1])


def measure(name: str, data: Set, seed: int, epochs: int) -> Iterator[common.Row]:
    """Curves of all trees and numbers of nodes for one trained model."""
    body, head = fitted(data, seed, epochs)
    with torch.no_grad():
        p = torch.cat([head.predict(body(data.test.x[i : i + 1000])) for i in range(0, len(data.test.y), 1000)])
        prototypes, absent = head.weight.detach(), head.absent
        assert absent is not None
        found = {
            "presence": LabelTree.from_prototypes(prototypes),
            "difference": LabelTree.from_prototypes(prototypes - absent.detach()),
            "natural": group_tree(data.groups),
        }
    found["shuffled"] = curves.shuffled(found["presence"], seed)
    setting = {"set": name, "seed": seed}
    precision = ll.precision_at_k(p, data.test.y, 1).item()
    bias = (p.mean(0) - data.test.y.float().mean(0)).abs().mean().item()
    yield {"part": "set", **setting, "labels": p.shape[1], "P@1": precision, "bias": bias}
    for label, tree in found.items():
        nodes = tree.probabilities(p, "negation")
        match = {"natural to tree": found["natural"].match(tree), "tree to natural": tree.match(found["natural"])}
        yield {"part": "set tree", **setting, "tree": label, **match, **excess(tree, p, data.test.y)}
        for theta in curves.THETAS:
            index = ll.decode_tree(nodes, tree, method="maxk_rew", k=max(NODES), theta=theta).index
            for k in NODES:  # nodes are chosen one after the other: fewer are the first of more
                accuracy, specificity = curves.point(index[:, :k], data.test.y, tree)
                row = {"at": theta, "accuracy": accuracy, "specificity": specificity}
                yield {"part": "set curve", **setting, "tree": label, "k": k, **row}


def excess(tree: LabelTree, p: Tensor, y: Tensor) -> common.Row:
    """Mean probability of the inner nodes by the negation rule, without re-calibration, and the share that is true."""
    inner = [v for v, below in enumerate(tree.children) if below and v != tree.root]
    says = tree.probabilities(p, "negation", recalibrate=False)[:, inner].mean().item()
    true = (y.double() @ tree.membership().double().T > 0)[:, inner].double().mean().item()
    return {"says": says, "true": true}
