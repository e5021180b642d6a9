"""Find the files of a pretrained model, refuse what is unsafe, and open it.

A model is a local folder as Hugging Face writes it: ``config.json``, weights in safetensors, for texts a tokenizer.
Nothing in it is run or unpickled: a folder whose config names code of its own, or that has only pickles, is refused.
Names are looked up on the network only with ``--download``, and then only files of these kinds are fetched.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

from lastlayer.train.config import Config, ConfigError
from lastlayer.train.encode.encoder import Encoder

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")
FETCHED = ("*.json", "*.safetensors", "*.txt", "*.model")
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
EXTRAS = {"transformers": "text", "timm": "images", "torchvision": "images", "PIL": "images"}
BARE = ("timm:", "torchvision:")  # an architecture of a library, for --scratch


def open_encoder(config: Config) -> Encoder:
    """Return the encoder that the settings of a run name.

    Args:
        config: The settings: `encoder`, `images`, `download`, `scratch`, `pooling`, `max_length`, `augment`, `seed`.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # of the weights of --scratch
        if config.encoder.startswith(BARE):
            return _bare(config)
        folder = locate(config.encoder, config)
        return open_folder(folder, config, scratch=config.scratch)


def open_folder(folder: Path, config: Config, *, scratch: bool = False) -> Encoder:
    """Return the encoder in a folder, after the checks of :func:`check`."""
    about = check(folder, scratch)
    if "model_type" in about:
        if config.images:
            from lastlayer.train.encode.image import transformers_image

            return transformers_image(folder, config, scratch=scratch)
        from lastlayer.train.encode.text import TextEncoder

        return TextEncoder.open(folder, config, scratch=scratch)
    if "architecture" not in about:
        raise ConfigError(f"{folder}/config.json: names neither a `model_type` (transformers) nor an `architecture`.")
    if not config.images:
        raise ConfigError(f"{folder}: holds an image model. Name the column of image files (--images COLUMN).")
    from lastlayer.train.encode.image import library_image

    return library_image(about, config, None if scratch else weights_of(folder))


def locate(name: str, config: Config) -> Path:
    """Return the folder of a model: a local one, or with ``--download`` a copy of a public one."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"`encoder` must be a folder, got the file {name}.")
    if not config.download:
        raise ConfigError(
            f"`encoder` must be a folder, got {name!r}, which is not there. If it is the name of a public model, "
            "allow its download with --download."
        )
    hub = needs("huggingface_hub", "images" if config.images else "text")
    repository = name if "/" in name or not config.images else f"timm/{name}"
    try:
        return Path(hub.snapshot_download(repository, allow_patterns=list(FETCHED)))
    except Exception as error:  # of the network, of the service or of the name: many kinds
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(f"`encoder` {name!r} cannot be downloaded: {type(error).__name__}: {reason}") from None


def check(folder: Path, scratch: bool = False) -> dict[str, Any]:
    """Return config.json of a model folder; refuse remote code, and weights that are not safetensors."""
    path = folder / "config.json"
    about = _json(path)
    if about is None:
        raise ConfigError(f"{folder}: holds no config.json, so it is not the folder of a model.")
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        if "auto_map" in (_json(folder / name) or {}):
            raise ConfigError(f"{folder}/{name}: asks to run code of its own (`auto_map`), which is never done.")
    if not scratch and not weights_of(folder):
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
        found = f"only {pickled[0]}, which may run code when it is opened" if pickled else "no weights"
        raise ConfigError(f"{folder}: must hold weights as safetensors, holds {found}. Convert it, or use --scratch.")
    listed = (_json(folder / "model.safetensors.index.json") or {}).get("weight_map") or {}
    if other := sorted(str(name) for name in dict(listed).values() if not str(name).endswith(".safetensors")):
        raise ConfigError(f"{folder}/model.safetensors.index.json: must name safetensors alone, got {other[0]!r}.")
    return about


def weights_of(folder: Path) -> list[Path]:
    """Return the files of weights in a folder."""
    return sorted(folder.glob("*.safetensors"))


def fingerprint(folder: Path) -> str:
    """Return a digest of config, tokenizer and weights of a model folder."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in folder.iterdir() if p.is_file() and (p.suffix == ".json" or p.name in TOKENIZERS)):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    for path in weights_of(folder):
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                found.update(block)
    return found.hexdigest()


def needs(package: str, extra: str | None = None) -> Any:
    """Import an optional package, or say in one line how to install it."""
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # RuntimeError: a build for another torch
        extra = extra or EXTRAS[package.partition(".")[0]]
        absent = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(package.partition(".")[0])
        why = "" if absent else f" ({' '.join(str(error).split())[:100]})"
        raise ConfigError(
            f'`encoder` needs the package {package}{why}. Install it with: pip install "lastlayer[{extra}]"'
        ) from None


def _bare(config: Config) -> Encoder:
    library, _, architecture = config.encoder.partition(":")
    if not config.scratch or not config.images:
        raise ConfigError(
            f"`encoder` {config.encoder} is an architecture without weights. It needs --scratch and --images COLUMN."
        )
    from lastlayer.train.encode.image import library_image

    return library_image({"library": library, "architecture": architecture}, config, None)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: must be JSON: {' '.join(str(error).split())[:120]}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold an object.")
    return found
