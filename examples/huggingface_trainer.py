"""Hugging Face Trainer with `compute_loss_func`: labels stay index lists, nothing is made multi-hot.

pip install transformers accelerate; python examples/huggingface_trainer.py
"""

import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import lastlayer as ll

CLASSES, K = 12, 3


class Rows(Dataset):
    """Token numbers whose first ones tell the labels; label lists padded with -1."""

    def __init__(self, n: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.rand(n, CLASSES, generator=generator).topk(K).indices
        noise = torch.randint(20, 60, (n, 5), generator=generator)
        self.tokens = torch.cat([self.labels + 1, noise], -1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[row], "labels": self.labels[row]}


def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return the mean over the rows of an optimiser step, of which gradient accumulation sees a part at a time.

    In training the Trainer does not divide by the number of parts. It passes the number of entries of the labels of all
    parts, padding included: the rows times the width of the lists.
    """
    rows = len(labels) if num_items_in_batch is None else num_items_in_batch / labels.shape[-1]
    return ll.lml_loss(outputs["logits"], labels, K, reduction="sum") / rows


def metrics(found: Any) -> dict[str, float]:
    scores, labels = torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids)
    return {"recall@3": float(ll.recall_at_k(scores, labels, K))}


def tiny_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        num_labels=CLASSES, max_position_embeddings=16, problem_type="multi_label_classification",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def main(epochs: int = 20) -> float:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=32, learning_rate=5e-3, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(
            model=tiny_model(), args=arguments, train_dataset=Rows(512, 0),
            eval_dataset=Rows(128, 1), compute_loss_func=loss, compute_metrics=metrics,
        )  # fmt: skip
        trainer.train()
        found = trainer.predict(Rows(128, 1))
    recall = metrics(found)["recall@3"]
    print(f"recall@3: {recall:.3f}")
    return recall


if __name__ == "__main__":
    main()
