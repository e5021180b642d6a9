"""Rows whose texts are the names of image files: find them, open them, leave out those that cannot be opened."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.data.labeldata import LabelData
from lastlayer.data.source import DataError


class ImageError(ValueError):
    """A file that is missing or no image. The message is one line and names the file."""


def in_folder(data: LabelData, folder: str | Path) -> LabelData:
    """Return rows whose names of files are meant from a folder, that of the file that lists them."""
    return replace(data, source={**data.source, "folder": str(folder)})


def image_files(data: LabelData) -> list[Path]:
    """Return the files that the texts of rows name."""
    if data.texts is None:
        raise DataError("the encoder takes image files, the rows name none. Give their column (--images COLUMN).")
    folder = Path(str(data.source.get("folder", ".")))
    return [folder / text for text in data.texts]


def open_image(file: Path) -> Any:
    """Return an image in colour; the error names the file."""
    try:
        from PIL import Image
    except ImportError:
        raise ImageError('images need the package pillow. Install it with: pip install "lastlayer[images]"') from None
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except (FileNotFoundError, IsADirectoryError):
        raise ImageError(f"there is no image {file}.") from None
    except Exception as error:  # readers of formats raise many kinds: struct.error, EOFError, SyntaxError, ...
        reason = " ".join(str(error).split())[:120].rstrip(".")
        raise ImageError(f"{file} is not an image that can be read: {reason or type(error).__name__}.") from None


def readable_images(data: LabelData, on_error: str = "raise") -> LabelData:
    """Return the rows whose images can be opened.

    Args:
        data: Rows whose texts name image files.
        on_error: ``"raise"`` at the first file that cannot be opened, or ``"skip"``: leave its row out and note it.
    """

    def problem(file: Path) -> str | None:
        try:
            open_image(file)
        except ImageError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        found = list(pool.map(problem, image_files(data)))
    numbers = data.row_numbers().tolist()
    wrong = [f"row {numbers[i]}: {text}" for i, text in enumerate(found) if text]
    if not wrong:
        return data
    if on_error == "raise":
        raise DataError(f"{wrong[0]} --on-error skip leaves such rows out.")
    problems = replace(
        data.problems, count=data.problems.count + len(wrong), listed=[*data.problems.listed, *wrong], told=False
    )
    return replace(data.take(np.flatnonzero([text is None for text in found])), problems=problems)
