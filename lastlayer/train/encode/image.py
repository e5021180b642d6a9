"""Image models of timm, torchvision and transformers as encoders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lastlayer.data import DataError, LabelData
from lastlayer.data.images import ImageError, image_files, open_image
from lastlayer.runs import write_atomically
from lastlayer.train.config import Config, ConfigError
from lastlayer.train.encode import source
from lastlayer.train.encode.encoder import WEIGHTS, Encoder, digest, load_weights, save_weights

IN_MEMORY = 1 << 30  # bytes of pixels that are kept; larger sets are read again in each epoch
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Format:
    """What a model expects of images.

    Args:
        height: In pixels.
        width: In pixels.
        crop: The part of the shorter side that is kept, around the middle.
        mean: Of the red, green and blue values between 0 and 1.
        std: Their standard deviations.
    """

    height: int = 224
    width: int = 224
    crop: float = 1.0
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]

    def pixels(self, file: Path) -> np.ndarray:
        """Return an image as ``(3, height, width)`` uint8: scaled so that the middle of it fills the format."""
        from PIL import Image

        image = open_image(file)
        scale = max(self.width / image.width, self.height / image.height) / self.crop
        wide, high = min(self.width / scale, image.width), min(self.height / scale, image.height)
        left, top = (image.width - wide) / 2, (image.height - high) / 2
        box = (left, top, left + wide, top + high)
        if (image.width, image.height) != (self.width, self.height) or self.crop != 1:
            image = image.resize((self.width, self.height), Image.Resampling.BICUBIC, box=box)
        return np.ascontiguousarray(np.asarray(image, np.uint8).transpose(2, 0, 1))


class Pictures:
    """Images by their files, which are read when they are needed, or kept if they are small.

    Args:
        files: The files.
        names: How messages name the rows.
        format: What the model expects.
        pixels: The images, if they are kept: ``(n, 3, height, width)`` uint8.
    """

    def __init__(
        self, files: Sequence[Path], names: Sequence[str], format: Format, pixels: np.ndarray | None = None
    ) -> None:
        self.files, self.names, self.format, self.pixels = list(files), list(names), format, pixels

    @classmethod
    def of(cls, data: LabelData, format: Format) -> Pictures:
        """Return the images of rows; small ones are read at once."""
        made = cls(image_files(data), [f"row {n}" for n in data.row_numbers().tolist()], format)
        if 3 * format.height * format.width * len(made.files) <= IN_MEMORY:
            made.pixels = made._read(np.arange(len(made.files)))
        return made

    @property
    def shape(self) -> tuple[int]:
        """The number of images."""
        return (len(self.files),)

    def __getitem__(self, rows: Any) -> Pictures:
        rows = np.arange(len(self.files))[rows]
        files, names = [self.files[i] for i in rows], [self.names[i] for i in rows]
        return Pictures(files, names, self.format, None if self.pixels is None else self.pixels[rows])

    def inputs(self, rows: np.ndarray) -> Tensor:
        """Return images as ``(rows, 3, height, width)`` uint8."""
        return torch.from_numpy(self._read(rows) if self.pixels is None else self.pixels[rows])

    def _read(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), 3, self.format.height, self.format.width), np.uint8)

        def fill(i: int) -> None:
            try:
                out[i] = self.format.pixels(self.files[rows[i]])
            except ImageError as error:
                raise DataError(f"{self.names[rows[i]]}: {error} --on-error skip leaves such rows out.") from None

        with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
            list(pool.map(fill, range(len(rows))))
        return out


class ImageEncoder(Encoder):
    """An image model without its last layer.

    Args:
        model: The model.
        pooled: From the model and a batch of images to one vector per image.
        width: The length of the vector.
        format: What the model expects of images.
        augment: Whether images are shifted, scaled and mirrored at random in training.
        about: What identifies the model.
        config: What ``config.json`` of its folder holds.
        keep: Called with a folder to write the model there, if it has a form of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        pooled: Callable[[nn.Module, Tensor], Tensor],
        width: int,
        format: Format,
        *,
        augment: bool,
        about: dict[str, Any],
        config: dict[str, Any] | None = None,
        keep: Callable[[Path], None] | None = None,
    ) -> None:
        super().__init__(width)
        self.model, self.pooled, self.format, self.augment = model, pooled, format, augment
        self.about, self.config, self.keep = about, config or {}, keep
        self.mean: Tensor
        self.std: Tensor
        for name in ("mean", "std"):
            values = torch.tensor(getattr(format, name), dtype=torch.float32).view(1, 3, 1, 1)
            self.register_buffer(name, 255 * values, persistent=False)

    def describe(self) -> dict[str, Any]:
        """Return what identifies the encoder."""
        plain = json.loads(json.dumps(asdict(self.format)))
        return {**super().describe(), "name": type(self.model).__name__, **self.about, "format": plain}

    def rows(self, data: LabelData) -> Pictures:
        """Return the images."""
        return Pictures.of(data, self.format)

    def keys(self, data: LabelData) -> list[bytes]:
        """Return digests of the files."""
        try:
            return [digest(file.read_bytes()) for file in image_files(data)]
        except OSError:
            self.rows(data)  # finds the row, and says so
            raise

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one vector per image."""
        x = (inputs.to(self.mean.dtype) - self.mean) / self.std
        if self.training and self.augment:
            x = moved(x)
        return self.pooled(self.model, x)

    def save(self, folder: Path) -> None:
        """Write the model to a folder."""
        if self.keep is not None:
            self.keep(folder)
            return
        write_atomically(folder / "config.json", json.dumps(self.config, indent=1).encode())
        save_weights(self.model, folder / WEIGHTS)


def moved(x: Tensor) -> Tensor:
    """Shift images by up to an eighth, scale them by 0.8 to 1.2 and mirror half of them, at random."""
    n = len(x)
    scale = torch.empty(n, device=x.device).uniform_(0.8, 1.2)
    mirror = 1 - 2.0 * (torch.rand(n, device=x.device) < 0.5).float()
    shift = torch.empty(n, 2, device=x.device).uniform_(-0.25, 0.25)
    zero = torch.zeros_like(scale)
    first, second = torch.stack([scale * mirror, zero, shift[:, 0]], 1), torch.stack([zero, scale, shift[:, 1]], 1)
    grid = nn.functional.affine_grid(torch.stack([first, second], 1), list(x.shape), align_corners=False)
    return nn.functional.grid_sample(x.float(), grid, padding_mode="reflection", align_corners=False).to(x.dtype)


def transformers_image(folder: Path, config: Config, *, scratch: bool = False) -> ImageEncoder:
    """Open an image model of transformers."""
    from lastlayer.train.encode.text import open_model, quiet

    source.needs("PIL")
    model = open_model(folder, scratch)
    if getattr(model.config, "num_channels", 3) != 3 or model.main_input_name != "pixel_values":
        raise ConfigError(f"{folder}: is not a model of colour images. Leave out --images for a model of texts.")
    format = _format_of(folder, model.config)
    with torch.no_grad():
        width = _states(model.eval(), torch.zeros(1, 3, format.height, format.width)).shape[-1]
    about = {"library": "transformers", "folder": str(folder.resolve()), "fingerprint": source.fingerprint(folder)}
    recipe = folder / "preprocessor_config.json"
    kept = recipe.read_bytes() if recipe.exists() else None

    def keep(to: Path) -> None:
        with quiet():
            model.save_pretrained(to)
        if kept is not None:
            write_atomically(to / recipe.name, kept)

    return ImageEncoder(model, _states, width, format, augment=config.augment, about=about, keep=keep)


def _states(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean over places of the last hidden state: of tokens, or of a map of features."""
    states = model(pixel_values=x).last_hidden_state
    mean: Tensor = states.mean((-2, -1)) if states.ndim == 4 else states.mean(1)
    return mean


def _format_of(folder: Path, about: Any) -> Format:
    """Return what preprocessor_config.json, or else the config, says about images."""
    recipe = source._json(folder / "preprocessor_config.json") or {}
    size = recipe.get("crop_size") or recipe.get("size") or getattr(about, "image_size", None) or 224
    if isinstance(size, dict):
        high = size.get("height", size.get("shortest_edge", 224))
        size = (high, size.get("width", high))
    high, wide = size if isinstance(size, list | tuple) else (size, size)
    mean, std = recipe.get("image_mean") or IMAGENET[0], recipe.get("image_std") or IMAGENET[1]
    return Format(int(high), int(wide), 1.0, tuple(map(float, mean)), tuple(map(float, std)))


def library_image(about: dict[str, Any], config: Config, weights: list[Path] | None) -> ImageEncoder:
    """Make a model of timm or torchvision from its ``config.json``, without its last layer.

    Args:
        about: ``architecture``, ``library`` (timm if it is missing), ``model_args`` and ``pretrained_cfg``.
        config: The settings of the run.
        weights: The file of weights; None starts at random weights.
    """
    source.needs("PIL")
    library, name = str(about.get("library", "timm")), str(about["architecture"])
    options = dict(about.get("model_args") or {})
    if library not in ("timm", "torchvision"):
        raise ConfigError(f"`encoder` must be a model of timm or torchvision, got library {library!r}.")
    module = source.needs(library)
    try:
        if library == "timm":
            model = module.create_model(name, pretrained=False, num_classes=0, **options)
        else:
            model = module.models.get_model(name, weights=None, **options)
    except Exception as error:  # of the name or its options: many kinds
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(f"`encoder`: {library} cannot make {name}: {type(error).__name__}: {reason}") from None
    if library == "torchvision":
        _behead(model)
    found = {"library": library, "name": f"{library}:{name}"}
    if weights:
        if len(weights) > 1:
            raise ConfigError(f"{weights[0].parent}: must hold one file of weights, holds {len(weights)}.")
        load_weights(model, weights[0], extra=True)
        folder = weights[0].parent
        found |= {"folder": str(folder.resolve()), "fingerprint": source.fingerprint(folder)}
    format = _library_format(about, getattr(model, "default_cfg", None) or {})
    with torch.no_grad():
        width = model.eval()(torch.zeros(1, 3, format.height, format.width)).shape[-1]
    kept = {**about, "library": library, "architecture": name}
    return ImageEncoder(model.float(), _plain, int(width), format, augment=config.augment, about=found, config=kept)


def _plain(model: nn.Module, x: Tensor) -> Tensor:
    features: Tensor = model(x)
    return features


def _behead(model: nn.Module) -> None:
    """Replace the last linear layer, which gives the scores of other labels, by nothing."""
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if linear:
        above, _, own = linear[-1].rpartition(".")
        setattr(model.get_submodule(above), own, nn.Identity())


def _library_format(about: dict[str, Any], default: dict[str, Any]) -> Format:
    known = {**default, **(about.get("pretrained_cfg") or {})}
    _, high, wide = known.get("input_size") or (3, 224, 224)
    mean, std = known.get("mean") or IMAGENET[0], known.get("std") or IMAGENET[1]
    return Format(int(high), int(wide), float(known.get("crop_pct") or 1.0), tuple(mean), tuple(std))
