"""Hand a trained run to other runtimes: torch.export or ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lastlayer.runs import RunError
from lastlayer.train.engine import load, quiet
from lastlayer.train.module import LabelSetModule


class Exported(nn.Module):
    """Dense rows of features to logits and probabilities; features.json says how to make the rows."""

    def __init__(self, module: LabelSetModule) -> None:
        super().__init__()
        self.network, self.resolved = module.network, module.resolved

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(logits, probabilities)``, each ``(rows, n_labels)``."""
        from lastlayer.project.lml import lml

        logits, count = self.network(features)
        if self.resolved.probability == "sigmoid":
            return logits, logits.sigmoid()
        return logits, lml(logits, float(self.resolved.k or 0) if count is None else count, impl="torch")


def export(run: str | Path, out: str | Path, kind: str = "onnx") -> Path:
    """Write the network of a run as an ONNX graph or a torch.export program.

    Args:
        run: The run folder.
        out: The file to write; it must not exist.
        kind: ``"onnx"`` or ``"torch"``.

    Returns:
        The file. Input: ``features`` (rows, n_features) float32, as ``features.json`` of the run makes them. Outputs:
        ``logits`` and ``probabilities`` (rows, n_labels), in the order of ``labels.json``.
    """
    out = Path(out)
    if out.exists():
        raise RunError(f"{out}: already there. Choose another name.")
    model = load(run)
    program = Exported(model.module).eval()
    rows = torch.export.Dim("rows", min=1, max=1 << 20)
    example = (torch.zeros(2, model.features.n_features),)
    with quiet("torch.onnx"):
        traced = torch.export.export(program, example, dynamic_shapes=({0: rows},))
        if kind == "torch":
            torch.export.save(traced, out)
        else:
            _onnx(traced, example, out)
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
