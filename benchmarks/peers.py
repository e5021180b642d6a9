"""One program on rows that `benchmarks.xmc` or `benchmarks.training` wrote, in a process and an environment of its own.

    PYTHON benchmarks/peers.py NAME FOLDER

`FOLDER` holds ``x.npz, y.npz, xt.npz`` (SciPy sparse, float32). Written there: ``NAME.npz`` with the best labels of
each test row and their scores, or the scores of all labels, and ``NAME.json`` with processor times, peak memory and the
size of the model. Other programs need numpy, SciPy, scikit-learn and themselves, and nothing of this package.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np  # noqa: E402
import scipy.sparse as sp  # noqa: E402

TOP = 10
peaks: list[float] = []


def cpu() -> float:
    """Return the processor time, and note the peak of memory so far: the first is before training, the second after."""
    peaks.append(peak_mb())
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_mb() -> float:
    """The largest memory of this process so far; `getrusage` would count that of the process it was forked from."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def padded(pairs: list[list[tuple[int, float]]], k: int) -> tuple[np.ndarray, np.ndarray]:
    index, value = np.full((len(pairs), k), -1), np.zeros((len(pairs), k), np.float32)
    for i, row in enumerate(pairs):
        for j, (label, score) in enumerate(row[:k]):
            index[i, j], value[i, j] = label, score
    return index, value


def folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def omikuji(x: Any, y: Any, xt: Any, folder: Path) -> dict[str, Any]:
    """Three Parabel trees with the defaults of the package; exp(-hinge^2) along the path, the mean of the trees."""
    import omikuji

    file = folder / "omikuji.txt"
    with file.open("w") as out:
        out.write(f"{x.shape[0]} {x.shape[1]} {y.shape[1]}\n")
        for i in range(x.shape[0]):
            labels = ",".join(map(str, y.indices[y.indptr[i] : y.indptr[i + 1]]))
            cells = range(x.indptr[i], x.indptr[i + 1])
            out.write(labels + " " + " ".join(f"{x.indices[t]}:{x.data[t]:.7g}" for t in cells) + "\n")
    hyper = omikuji.Model.default_hyper_param()
    begun = cpu()
    model = omikuji.Model.train_on_data(str(file), hyper, n_threads=1)
    trained = cpu()
    rows = [
        list(zip(xt.indices[a:b].tolist(), xt.data[a:b].tolist(), strict=True))
        for a, b in zip(xt.indptr[:-1], xt.indptr[1:], strict=True)
    ]
    ready = cpu()
    pairs = [model.predict(row, beam_size=10, top_k=TOP) for row in rows]
    ended = cpu()
    model.save(str(folder / "omikuji_model"))
    file.unlink()
    index, score = padded(pairs, TOP)
    return {
        "index": index,
        "score": score,
        "train": trained - begun,
        "predict": ended - ready,
        "bytes": folder_bytes(folder / "omikuji_model"),
    }


def pecos(x: Any, y: Any, xt: Any, folder: Path) -> dict[str, Any]:
    """XR-Linear with its defaults: label vectors PIFA, k-means with 16 branches, l3-hinge along the path."""
    from pecos.xmc import Indexer, LabelEmbeddingFactory
    from pecos.xmc.xlinear.model import XLinearModel

    begun = cpu()
    vectors = LabelEmbeddingFactory.create(y, x, method="pifa", threads=1)
    chain = Indexer.gen(vectors, indexer_type="hierarchicalkmeans", threads=1)
    model = XLinearModel.train(x, y, C=chain, threads=1)
    trained = cpu()
    found = model.predict(xt, only_topk=TOP, threads=1)
    ended = cpu()
    model.save(str(folder / "pecos_model"))
    pairs = [
        sorted(zip(found.indices[a:b].tolist(), found.data[a:b].tolist(), strict=True), key=lambda p: -p[1])
        for a, b in zip(found.indptr[:-1], found.indptr[1:], strict=True)
    ]
    index, score = padded(pairs, TOP)
    return {
        "index": index,
        "score": score,
        "train": trained - begun,
        "predict": ended - trained,
        "bytes": folder_bytes(folder / "pecos_model"),
    }


def napkinxc(x: Any, y: Any, xt: Any, folder: Path) -> dict[str, Any]:
    """A probabilistic label tree with its defaults (logistic nodes): the product of probabilities along the path."""
    from napkinxc.models import PLT

    lists = [y.indices[a:b].tolist() for a, b in zip(y.indptr[:-1], y.indptr[1:], strict=True)]
    model = PLT(str(folder / "napkinxc_model"), threads=1, seed=0)
    begun = cpu()
    model.fit(x, lists)
    trained = cpu()
    model.load()
    ready = cpu()
    pairs = model.predict_proba(xt, top_k=TOP)
    ended = cpu()
    index, score = padded(pairs, TOP)
    return {
        "index": index,
        "score": score,
        "train": trained - begun,
        "predict": ended - ready,
        "bytes": folder_bytes(folder / "napkinxc_model"),
    }


def lastlayer(x: Any, y: Any, xt: Any, folder: Path, *, grouped: bool = False, trees: int = 3) -> dict[str, Any]:
    """Label trees of this package with their defaults."""
    from lastlayer.train.linear import LinearTree, TreeSettings

    groups = np.load(folder / "groups.npy") if grouped else None
    begun = cpu()
    tree = LinearTree.fit(x, y, TreeSettings(threads=1, trees=trees), groups=groups)
    trained = cpu()
    tree.save(folder / "lastlayer_model")
    tree = LinearTree.load(folder / "lastlayer_model")
    ready = cpu()
    index, p = tree.predict_proba(xt, TOP)
    ended = cpu()
    return {
        "index": index,
        "score": p,
        "train": trained - begun,
        "predict": ended - ready,
        "bytes": folder_bytes(folder / "lastlayer_model"),
    }


def lastlayer_flat(x: Any, y: Any, xt: Any, folder: Path) -> dict[str, Any]:
    """The exact solver of this package, one classifier per label, as `LinearSVC` has it."""
    from lastlayer.train.linear import fit_linear

    begun = cpu()
    found = fit_linear(x, y, threads=1)
    trained = cpu()
    weights = found.matrix().T.tocsr().astype(np.float32)
    scores = (xt @ weights).toarray() + found.intercept.astype(np.float32)
    ended = cpu()
    return {"scores": scores, "train": trained - begun, "predict": ended - trained, "bytes": weights.nnz * 8}


def linearsvc(x: Any, y: Any, xt: Any, folder: Path) -> dict[str, Any]:
    """scikit-learn's one-versus-rest LinearSVC with its defaults; a label without rows has no classifier."""
    from sklearn.svm import LinearSVC

    columns, n = y.tocsc(), y.shape[0]
    weights = np.zeros((x.shape[1], y.shape[1]), np.float32)
    intercept = np.full(y.shape[1], -1.0, np.float32)
    begun = cpu()
    for label in range(y.shape[1]):
        rows = columns.indices[columns.indptr[label] : columns.indptr[label + 1]]
        if 0 < len(rows) < n:
            target = np.zeros(n, int)
            target[rows] = 1
            model = LinearSVC(dual=True, random_state=0).fit(x, target)
            weights[:, label], intercept[label] = model.coef_[0], model.intercept_[0]
    trained = cpu()
    scores = np.asarray(xt @ weights) + intercept
    ended = cpu()
    return {"scores": scores, "train": trained - begun, "predict": ended - trained, "bytes": weights.nbytes}


def pecos_flat(x: Any, y: Any, xt: Any, folder: Path) -> dict[str, Any]:
    """PECOS without a tree: one classifier per label, no weights cut."""
    from pecos.xmc.xlinear.model import XLinearModel

    begun = cpu()
    model = XLinearModel.train(x, y, threads=1, threshold=0.0)
    trained = cpu()
    found = model.predict(xt, only_topk=y.shape[1], post_processor="noop", threads=1)
    ended = cpu()
    scores = np.full((xt.shape[0], y.shape[1]), -1.0, np.float32)
    scores[np.repeat(np.arange(xt.shape[0]), np.diff(found.indptr)), found.indices] = found.data
    return {"scores": scores, "train": trained - begun, "predict": ended - trained, "bytes": 0}


def libmultilabel(x: Any, y: Any, xt: Any, folder: Path) -> dict[str, Any]:
    """LibMultiLabel, one versus rest: the dual solver of the squared hinge with C = 1 and a bias, like the others."""
    from libmultilabel import linear

    begun = cpu()
    model = linear.train_1vsrest(y, x, options="-s 1 -c 1 -B 1 -m 1", verbose=False)
    trained = cpu()
    scores = np.asarray(model.predict_values(xt), np.float32)
    ended = cpu()
    return {"scores": scores, "train": trained - begun, "predict": ended - trained, "bytes": 0}


PEERS: dict[str, Callable[..., dict[str, Any]]] = {
    "lastlayer": lastlayer,
    "lastlayer_grouped": partial(lastlayer, grouped=True),
    "lastlayer_one_tree": partial(lastlayer, trees=1),
    "omikuji": omikuji,
    "pecos": pecos,
    "napkinxc": napkinxc,
    "lastlayer_flat": lastlayer_flat,
    "linearsvc": linearsvc,
    "pecos_flat": pecos_flat,
    "libmultilabel": libmultilabel,
}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    x, y, xt = (sp.load_npz(folder / f"{part}.npz").tocsr() for part in ("x", "y", "xt"))
    found = PEERS[name](x, y.astype(np.float32), xt, folder)
    np.savez(folder / f"{name}.npz", **{key: found.pop(key) for key in ("index", "score", "scores") if key in found})
    found["start_mb"], found["peak_mb"] = peaks[:2]
    (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
