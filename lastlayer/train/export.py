"""Export a trained run to other runtimes: torch.export or ONNX with a JSON file beside it, or label trees.

The graph maps features to logits and probabilities. The JSON file holds what stands before and after it, so that texts
become label sets without lastlayer: ``{"format": 1, "features", "labels", "decide", "thresholds", "k"}``.

``features``
    How a row becomes features, by ``kind``. ``tfidf``: the ``vocabulary``, the ``idf`` of each word, ``analyzer``
    (``word``, ``char`` or ``char_wb``), the shortest and the longest of the ``ngrams`` and, for words, the regular
    expression ``token_pattern``, which is applied to the text in lower case. A feature is (1 + log count) x idf, and
    rows have unit length. ``hashing``: ``n_features`` buckets of scikit-learn's HashingVectorizer
    (``alternate_sign=False``). ``dense``: (value - ``mean``) / ``scale``. ``sparse`` and ``dense`` with ``l2``: rows
    are scaled to unit length. ``frozen``: the features of ``encoder``, with its ``folder`` and ``pooling``, then scaled
    as ``scaled`` says.
``labels``
    The names of the labels, in the order of the columns.
``decide``, ``thresholds``
    The rule of ``--decide``, and one probability per label above which a label is predicted.
``k``
    Where ``thresholds`` is null: the number of labels per row; null: the sum of the row's probabilities, rounded, at
    least 1.

Label trees become a folder with a program that reads them.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lastlayer.runs import RunError, write_atomically
from lastlayer.runs.files import naming, to_json
from lastlayer.train.network_scorer import NetworkScorer
from lastlayer.train.serve import TrainedModel, load, probabilities


class Exported(nn.Module):
    """Map dense rows of features, which features.json says how to make, to logits and probabilities."""

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        assert isinstance(model.scorer, NetworkScorer)
        self.network, self.resolved, self.count = model.scorer.network, model.resolved, model.count
        if self.count is not None:
            self.count_weight = nn.Buffer(torch.from_numpy(self.count.weight))
        self.calibrated = model.calibration is not None
        if model.calibration is not None:
            slope, offset, self.observed = model.calibration.tensors(torch.zeros(()))
            self.slope, self.offset = nn.Buffer(slope), nn.Buffer(offset)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(logits, probabilities)``, each ``(rows, n_labels)``."""
        logits, count = self.network(features), None
        if self.count is not None:
            count = (features @ self.count_weight + self.count.bias).expm1().clamp(self.count.low, self.count.high)
        calibration = (self.slope, self.offset, self.observed) if self.calibrated else None
        return logits, probabilities(logits, self.resolved, count, calibration=calibration)[0]


def export(run: str | Path, out: str | Path, kind: str = "onnx") -> Path:
    """Write the network of a run as an ONNX graph or a torch.export program, or its label trees as a folder.

    Args:
        run: The run folder.
        out: The file or, for label trees, the folder to write; it must not exist.
        kind: ``"onnx"``, ``"torch"``, or ``"tree"`` for label trees, which have no other form.

    Returns:
        The file. Its input is ``features`` (rows, n_features) float32, its outputs are ``logits`` and
        ``probabilities`` (rows, n_labels). A file of the same name with the suffix ``.json`` says how texts become
        features and how probabilities become label sets (see :mod:`lastlayer.train.export`). The
        folder of label trees holds their files and ``predict.py``, which describes and reads them with numpy alone.
    """
    from lastlayer.train.fit_network import quiet

    out = Path(out)
    beside = out.with_suffix(".json")
    for path in (out,) if kind == "tree" else (out, beside):
        if path.exists():
            raise RunError(f"{path}: already there. Choose another name.")
    model = load(run)
    is_tree = not isinstance(model.scorer, NetworkScorer)
    if is_tree != (kind == "tree"):
        rule = "tree for label trees" if is_tree else "onnx or torch for a run without label trees"
        raise RunError(f"{run}: the format must be {rule}, got {kind}.")
    if is_tree:
        with _whole(out):
            return _tree(Path(run), out)
    if model.config.trains_encoder():
        raise RunError(f"{run}: an encoder has no export here. Its folder {run}/encoder is one of its own library.")
    program = Exported(model).eval()
    rows = torch.export.Dim("rows", min=1, max=1 << 20)
    example = (torch.zeros(2, model.features.n_features),)
    with quiet("torch.onnx"), _whole(out):
        traced = torch.export.export(program, example, dynamic_shapes=({0: rows},))
        if kind == "torch":
            whole = io.BytesIO()
            torch.export.save(traced, whole)  # on a full disk, it would end the process
            write_atomically(out, whole.getvalue())
        else:
            with naming(out):
                _onnx(traced, example, out)
        write_atomically(beside, to_json(description(model)))
    return out


@contextmanager
def _whole(out: Path) -> Iterator[None]:
    """Remove what was written if not all of it could be: it was not there before, and stands in the way of a retry."""
    try:
        yield
    except BaseException:
        if out.is_dir():
            shutil.rmtree(out, ignore_errors=True)
        else:
            out.unlink(missing_ok=True)
        raise


def description(model: TrainedModel) -> dict[str, Any]:
    """Return what the JSON file beside the graph holds."""
    level = None if model.decision is None else model.decision.per_label(len(model.labels))
    expected = model.fixed_k if model.calibration is not None else None
    return {
        "features": model.features.described(),
        "labels": list(model.labels),
        "decide": "top_k" if model.decision is None else model.decision.rule,
        "thresholds": None if level is None else level.tolist(),
        "k": expected,
    }


def _tree(run: Path, out: Path) -> Path:
    """Copy the files of label trees, and the program that reads them."""
    from lastlayer.train.linear import consumer

    out.mkdir(parents=True)
    for name in ("tree.json", "tree.safetensors", "labels.json", "features.json"):
        shutil.copyfile(run / name, out / name)
    shutil.copyfile(consumer.__file__, out / "predict.py")
    return out


def _onnx(program: Any, example: Any, out: Path) -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise RunError(
            "export to ONNX needs the packages onnx and onnxscript. Install them, or use --format torch."
        ) from None
    written = torch.onnx.export(
        program, example, input_names=["features"], output_names=["logits", "probabilities"], dynamo=True, verbose=False
    )
    assert written is not None
    written.save(str(out))
