"""The networks below the labels: a transformer for texts and a ResNet for images, both from random weights."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments import cifar
from lastlayer.data import LabelData
from lastlayer.train.encode import Encoder
from lastlayer.train.encode.image import moved
from lastlayer.train.encode.text import Tokens

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def save_bert(folder: Path, texts: list[str], *, words: int, width: int, layers: int) -> str:
    """Write the config of a BERT, and a WordPiece tokenizer made of the texts; return the version of transformers."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=words, special_tokens=SPECIAL))
    ends = [("[CLS]", made.token_to_id("[CLS]")), ("[SEP]", made.token_to_id("[SEP]"))]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **names).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=made.get_vocab_size(), hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * width, max_position_embeddings=64,
    )  # fmt: skip
    config.save_pretrained(folder)
    return f"transformers {transformers.__version__}"


class TorchTransformer(Encoder):
    """A transformer of torch on whole words, where the package transformers is missing."""

    is_text = True

    def __init__(self, texts: list[str], *, words: int, width: int, layers: int, most: int = 64) -> None:
        super().__init__(width)
        counts = Counter(word for text in texts for word in self.split(text))
        self.place = {word: i + 2 for i, (word, _) in enumerate(counts.most_common(words - 2))}
        self.most = most
        self.words, self.places = nn.Embedding(words, width, padding_idx=0), nn.Embedding(most, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    @staticmethod
    def split(text: str) -> list[str]:
        """The words and marks of a text."""
        return re.findall(r"\w+|[^\w\s]", text.lower())

    def rows(self, data: LabelData) -> Tokens:
        """The texts as numbers of words."""
        lists = [[self.place.get(w, 1) for w in self.split(text)[: self.most]] or [1] for text in data.texts or []]
        indptr = np.concatenate([[0], np.cumsum([len(row) for row in lists])]).astype(np.int64)
        return Tokens({"input_ids": np.array([w for row in lists for w in row], np.int32)}, indptr, {"input_ids": 0})

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        x = self.norm(self.body(x, src_key_padding_mask=~mask))
        weight = mask.to(x.dtype).unsqueeze(-1)
        return (x * weight).sum(1) / weight.sum(1)


class Pixels:
    """Images in memory, as ``(n, 32 * 32 * 3)`` uint8."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, (len(values),)

    def __getitem__(self, rows: Any) -> Pixels:
        return Pixels(self.values[rows])

    def inputs(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(self.values[rows])


class SmallResNet(Encoder):
    """The residual network of the other experiments on CIFAR-100, with images moved at random in training."""

    def __init__(self, width: int) -> None:
        super().__init__(6 * width)
        self.body = cifar.resnet(width)
        for name, values in (("mean", cifar.MEAN), ("std", cifar.STD)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1), persistent=False)

    def rows(self, data: LabelData) -> Pixels:
        return Pixels(data.features)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.view(-1, 32, 32, 3).permute(0, 3, 1, 2).float()
        x = (x - self.mean) / self.std
        return self.body(moved(x) if self.training else x)
