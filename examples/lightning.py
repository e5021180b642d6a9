"""A Lightning module of your own with a loss and a streaming metric of the package.

python examples/lightning.py
"""

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lastlayer as ll


class Tagger(pl.LightningModule):
    def __init__(self, features: int = 20, classes: int = 12, k: int = 3) -> None:
        super().__init__()
        self.network = nn.Linear(features, classes)
        self.loss = ll.LMLLoss(k=k)
        self.recall = ll.metrics.RecallAtK(k)  # obeys torchmetrics: Lightning resets and reduces it

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, labels = batch
        return self.loss(self.network(x), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, labels = batch
        self.recall.update(self.network(x), labels)
        self.log("recall@3", self.recall, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def main(epochs: int = 20) -> float:
    pl.seed_everything(0, verbose=False)
    x = torch.randn(800, 20)
    labels = (x @ torch.randn(20, 12)).topk(3).indices
    train, valid = TensorDataset(x[:600], labels[:600]), TensorDataset(x[600:], labels[600:])
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Tagger(), DataLoader(train, 64, shuffle=True), DataLoader(valid, 200))
    recall = float(trainer.callback_metrics["recall@3"])
    print(f"recall@3: {recall:.3f}")
    return recall


if __name__ == "__main__":
    main()
