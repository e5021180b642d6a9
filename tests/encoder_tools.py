"""Tiny pretrained models, made on the fly: a BERT with a vocabulary of its own, a ViT, and images of 16 x 16."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from lastlayer.data import LabelData

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "dark": (0, 0, 0)}


def save_bert(folder: Path, texts: list[str], *, width: int = 16, seed: int = 0) -> Path:
    """Write a BERT of two layers whose WordPiece vocabulary is the words of the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = [*SPECIAL, *sorted({word for text in texts for word in text.split()})]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **names)
    config = BertConfig(
        vocab_size=len(words), hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=2 * width, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    _save(folder, BertModel, config, seed, tokenizer)
    return folder


def save_vit(folder: Path, *, seed: int = 0) -> Path:
    """Write a ViT of two layers for images of 16 x 16."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        initializer_range=0.2,
    )  # fmt: skip
    _save(folder, ViTModel, config, seed)
    return folder


def _save(folder: Path, kind: type, config: object, seed: int, tokenizer: object | None = None) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind(config).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def save_images(folder: Path, n: int = 60, seed: int = 0) -> Path:
    """Write images whose halves have colours, and a table of their files and colours."""
    from PIL import Image

    rng, lines = np.random.default_rng(seed), ["file,labels"]
    (folder / "images").mkdir(parents=True)
    for i in range(n):
        pair = [list(COLOURS)[c] for c in rng.integers(len(COLOURS), size=2)]
        pixels = rng.integers(0, 60, (16, 16, 3)) + np.repeat([COLOURS[c] for c in pair], 8, 0)[:, None] * 0.7
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"images/{i}.png")
        lines.append(f"images/{i}.png,{';'.join(sorted(set(pair)))}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv"


def write_rows(path: Path, rows: LabelData) -> Path:
    """Write texts and labels as a table."""
    lines = [f"{rows.texts[i]}\t{','.join(rows.names(i))}" for i in range(len(rows))]
    path.write_text("text\tlabels\n" + "\n".join(lines) + "\n")
    return path


def import_images(library: str) -> None:
    """Import timm or torchvision; the test is skipped where it is missing, or does not fit the torch of the machine.

    A torchvision built for CUDA finds no compiled operators beside a torch without it, and stops at the first that it
    describes. Its models need none of them: the names are enough.
    """
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("no torchvision")
    try:
        importlib.import_module("torchvision")
    except (RuntimeError, ImportError):
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # it is there
                torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float share) -> Tensor")
    try:
        pytest.importorskip(library)
    except (RuntimeError, ImportError):
        pytest.skip(f"{library} does not fit this torch")
