"""What training and prediction know of an encoder."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lastlayer.data import DataError, LabelData
from lastlayer.runs import write_atomically

WEIGHTS = "model.safetensors"


class Encoder(nn.Module):
    """A network from rows to features, and how rows become its input.

    The encoders of ``--encoder`` are subclasses. So is any network of your own: write `forward`, and `rows` unless the
    input is the array of features that the data hold; then pass an instance to ``train(..., encoder=...)``.

    Args:
        width: The number of features per row that `forward` returns.

    Example:
        >>> import torch
        >>> from lastlayer.train.encode import Encoder
        >>> class Pooled(Encoder):
        ...     def __init__(self):
        ...         super().__init__(width=4)
        ...         self.layer = torch.nn.Linear(8, 4)
        ...     def forward(self, inputs):
        ...         return self.layer(inputs).relu()
        >>> Pooled()(torch.zeros(2, 8)).shape
        torch.Size([2, 4])
    """

    is_text = False  # whether the rows are texts

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def rows(self, data: LabelData) -> Any:
        """Return the rows in a form that can be indexed: an array, or an object of your own.

        Such an object needs ``shape[0]``, ``x[rows]`` for a slice or an array of row numbers, and
        ``inputs(rows)``, which returns what `forward` takes: a tensor, or a dictionary of tensors.
        """
        if data.features is None:
            raise DataError(f"the encoder {type(self).__name__} takes features, the rows have none.")
        return np.asarray(data.features, np.float32)

    def forward(self, inputs: Any) -> Tensor:
        """Return the features, ``(rows, width)``."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return plain values that identify the encoder: what they are when a run starts must hold when it goes on."""
        return {"name": type(self).__name__, "width": self.width, "parameters": count_parameters(self)}

    def keys(self, data: LabelData) -> list[bytes]:
        """Return a digest of 16 bytes per row: rows with the same digest have the same features."""
        if data.texts is not None:
            return [digest(text.encode("utf-8", "surrogatepass")) for text in data.texts]
        return [digest(np.ascontiguousarray(row).tobytes()) for row in np.asarray(data.features, np.float32)]

    def save(self, folder: Path) -> None:
        """Write the encoder to a folder."""
        save_weights(self, folder / WEIGHTS)

    def restore(self, folder: Path) -> None:
        """Take back the weights that :meth:`save` has written."""
        load_weights(self, folder / WEIGHTS)


def weights_digest(module: nn.Module) -> str:
    """Return a digest of the weights of a module."""
    found = hashlib.blake2b(digest_size=16)
    for name, value in module.state_dict().items():
        found.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def digest(content: bytes) -> bytes:
    """Return 16 bytes that tell contents apart."""
    return hashlib.blake2b(content, digest_size=16).digest()


def count_parameters(module: nn.Module) -> int:
    """Return the number of weights of a module."""
    return sum(p.numel() for p in module.parameters())


def save_weights(module: nn.Module, path: Path) -> None:
    """Write the weights of a module as safetensors; the file is whole or not there."""
    from safetensors.torch import save

    write_atomically(path, save({k: v.detach().cpu().clone() for k, v in module.state_dict().items()}))


def load_weights(module: nn.Module, path: Path, *, extra: bool = False) -> None:
    """Load weights from safetensors; with `extra`, the file may hold tensors that the module does not have."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = module.load_state_dict(load_file(path), strict=False)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise DataError(f"{path}: does not fit the model: {' '.join(str(error).split())[:160]}.") from None
    wrong = list(found.missing_keys) + ([] if extra else list(found.unexpected_keys))
    if wrong:
        raise DataError(f"{path}: does not fit the model: {len(wrong)} tensors differ, the first is {wrong[0]}.")


def to_device(inputs: Any, device: torch.device) -> Any:
    """Move a tensor, or a dictionary of tensors, to a device."""
    if isinstance(inputs, dict):
        return {name: value.to(device) for name, value in inputs.items()}
    return inputs.to(device)


def by_depth(module: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """Return the weights of a network in blocks, from the input to the output.

    The numbers in the names tell the blocks: ``layer.0``, ``layer.1`` and so on. What comes before the first of them
    (embeddings) and after the last (a norm) counts as one block with its neighbours of the same kind.

    Example:
        >>> stack = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
        >>> [[name for name, _ in block] for block in by_depth(stack)]
        [['0.weight', '0.bias'], ['1.weight', '1.bias']]
    """
    blocks: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            found = re.match(r"(.*?\d+)(?:\.|$)", name.rpartition(".")[0] + ".")
            blocks.setdefault(found[1] if found else "", []).append((name, parameter))
    loose = blocks.pop("", [])
    if not blocks:
        return [loose]
    names = [name for name, _ in module.named_parameters()]
    first = names.index(next(iter(blocks.values()))[0][0])
    before = [pair for pair in loose if names.index(pair[0]) < first]
    after = [pair for pair in loose if names.index(pair[0]) >= first]
    return [block for block in (before, *blocks.values(), after) if block]


def chunks(x: Any, size: int) -> Iterator[np.ndarray]:
    """Yield row numbers, `size` at a time; rows of similar length come together where lengths are known."""
    n = int(x.shape[0])
    lengths = getattr(x, "lengths", None)
    order = np.arange(n) if lengths is None else np.argsort(lengths, kind="stable")
    for at in range(0, n, size):
        yield order[at : at + size]


@torch.no_grad()
def encode(encoder: Encoder, x: Any, *, size: int = 64, precision: str = "32") -> Tensor:
    """Return the features of rows, ``(rows, width)`` float32, on the device of the encoder."""
    from lastlayer.train.batches import rows_to_input

    device = device_of(encoder)
    out = torch.zeros(int(x.shape[0]), encoder.width, device=device)
    was = encoder.training
    encoder.eval()
    try:
        for rows in chunks(x, size):
            with autocast(device, precision):
                found = encoder(to_device(rows_to_input(x, rows), device))
            out[torch.from_numpy(rows).to(device)] = found.float()
    finally:
        encoder.train(was)
    return out


def autocast(device: torch.device, precision: str) -> Any:
    """Return the context of mixed precision: on a GPU as training had it, on a CPU full precision."""
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    return torch.autocast(device.type, dtype=half, enabled=precision != "32" and device.type == "cuda")


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's weights."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def best_device(accelerator: str) -> torch.device:
    """Return the device that training would take for ``--accelerator``."""
    if accelerator in ("auto", "gpu") and torch.cuda.is_available():
        return torch.device("cuda")
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
