"""The Lightning parts: the data module and the training step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lastlayer._check import label_lists
from lastlayer.data import LabelData
from lastlayer.decode.top_k import decode_top_k
from lastlayer.head.sharded import ShardedLinear
from lastlayer.runs.rows import AT_K
from lastlayer.train.batches import EpochBatches, Rows
from lastlayer.train.config import Config
from lastlayer.train.lazy import LazyRows, worthwhile
from lastlayer.train.losses import LOSSES, loss_function
from lastlayer.train.network import Input, LabelSetNetwork
from lastlayer.train.placement import Placement
from lastlayer.train.resolved import SET_METRICS, Resolved
from lastlayer.train.serve import probabilities

LOOK = 50  # steps between looks at the loss where looking takes time


class TrainingError(RuntimeError):
    """Training cannot go on: the loss is not a finite number."""


def not_finite(value: float, where: str, config: Config) -> str:
    """Return the message about a loss that is not a finite number."""
    return (
        f"the loss became {value} in {where}. Lower `lr`, which is {float(config.lr):g}, or bound the gradient with "
        "`clip_norm`."
    )


def _whole(batch: Any) -> Any:
    """Return the batch, which `Rows` has made whole."""
    return batch


class LabelSetData(pl.LightningDataModule):
    """Training and validation rows for a Lightning Trainer.

    Args:
        x: Training features, dense or CSR, float32.
        labels: The training label lists.
        valid_x: Validation features, or None.
        valid_labels: The validation label lists, or None.
        batch_size: Rows per step and device.
        seed: The seed of the order of rows.
        share: Which part of each batch to take, and of how many parts.
    """

    def __init__(
        self,
        x: Any,
        labels: LabelData,
        valid_x: Any = None,
        valid_labels: LabelData | None = None,
        *,
        batch_size: int = 128,
        seed: int = 0,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__()
        self.share = share
        self.train_rows = Rows(x, labels)
        self.valid_rows = None if valid_labels is None else Rows(valid_x, valid_labels)
        self.batch_size, self.seed = batch_size, seed

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Return batches in an order that depends on seed and epoch."""
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        options = {"seed": self.seed, "rank": rank, "world": world, "share": self.share}
        batches = EpochBatches(len(self.train_rows), self.batch_size, **options)  # type: ignore[arg-type]
        return DataLoader(self.train_rows, sampler=batches, batch_size=None, collate_fn=_whole)

    def val_dataloader(self) -> Any:
        """Return the validation rows in order; every rank sees all of them, so that metrics are exact.

        Rows of weight 0 are left out, unless all rows have weight 0; other weights have no effect.
        """
        if self.valid_rows is None:
            return []
        size = self.batch_size if hasattr(self.valid_rows.x, "inputs") else max(self.batch_size, 256)
        weights = self.valid_rows.labels.weights
        batches: Any = EpochBatches(len(self.valid_rows), size, seed=None)
        if weights is not None and weights.any():
            counted = np.flatnonzero(weights)
            batches = [counted[rows] for rows in EpochBatches(len(counted), size, seed=None)]
        return DataLoader(self.valid_rows, sampler=batches, batch_size=None, collate_fn=_whole)


class LabelSetModule(pl.LightningModule):
    """A network with its loss and optimiser.

    Args:
        network: The network, from rows to logits.
        config: The choices of the run.
        resolved: What "auto" became.
        total_steps: The number of steps of the whole run, for the schedule.
        placement: Where the labels are; by default all of them are in this process.
    """

    def __init__(
        self,
        network: LabelSetNetwork,
        config: Config,
        resolved: Resolved,
        *,
        total_steps: int,
        placement: Placement | None = None,
    ) -> None:
        super().__init__()
        config = config.settled(network.sparse)
        self.network, self.config, self.resolved, self.total_steps = network, config, resolved, max(total_steps, 1)
        self.placement = placement or Placement()
        self.function, facts = loss_function(resolved.loss), LOSSES[resolved.loss]
        self.options = {**config.loss_options, **self.placement.loss_options()}
        self.only_labelled = False  # whether rows without a label have no loss
        if facts.observed:
            self.options["observed"] = resolved.observed
            if config.labels == "incomplete" and resolved.observed:
                self.only_labelled, self.options["reduction"] = True, "none"
        self.arguments: tuple[float, ...] = ()  # between the target and the options
        if facts.k != "none":
            self.arguments = (max(round(resolved.k), 1) if facts.k == "whole" else resolved.k,)
        self.optimizer_state: dict[str, Any] | None = None
        self.to_loggers = True  # whether loggers get the validation metrics from here
        self._sums: dict[str, float] = {}
        self._streams: dict[str, Any] = {}
        self._measures_sets = self.placement.shard is None and resolved.monitor in SET_METRICS
        self._train_sum: Tensor | None = None
        self._train_steps = 0

    def start_at_frequencies(self, labels: LabelData) -> None:
        """Set the output biases to the log-odds of the labels, with rows counted by their weights."""
        n, counts = len(labels), torch.from_numpy(labels.label_counts()).float()
        if labels.weights is not None and labels.weights.any():
            per_label = np.repeat(labels.weights / labels.weights.mean(), labels.row_counts())
            counts = torch.from_numpy(np.bincount(labels.indices, per_label, labels.n_labels)).float().clamp(max=n)
        bias = ((counts + 0.5) / (n - counts + 0.5)).log()
        with torch.no_grad():
            self.network.output_bias().copy_(self.placement.own(bias))

    def loss(self, rows: Input, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, with a weight for each row if there are any, and its logits."""
        logits = self.network(rows).float()
        return self.loss_of(logits, target, weight), logits

    def loss_of(self, logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the loss of the logits of a batch, with a weight for each row if there are any."""
        options = self.options if weight is None or self.only_labelled else {**self.options, "sample_weight": weight}
        value = self.function(logits, label_lists(target), *self.arguments, **options)
        return self._mean(value, target, weight)

    def loss_in_blocks(self, rows: Input, target: Tensor) -> Tensor:
        """Return the LML loss of a batch, as :meth:`loss` does, without holding its logits."""
        output = self.network.rest[-1]
        assert isinstance(output, ShardedLinear)
        options = {n: value for n, value in self.options.items() if n in ("observed", "temperature", "reduction")}
        value = output.loss(self.network.before_output(rows), label_lists(target), *self.arguments, **options)
        return self._mean(value, target).float()

    def _mean(self, value: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean over the rows; with incomplete labels a row without a label has no loss.

        If a row has k labels and each is hidden with the same probability, seeing none of them does not tell which
        they are. The thinned likelihood, which takes labels as independent, would draw the scores of the row together.
        """
        if not self.only_labelled:
            return value
        weight = torch.ones(len(target), device=value.device) if weight is None else weight
        total = weight.sum().clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where((target >= 0).any(-1), value.float() * weight, 0).sum() / total

    def on_train_epoch_start(self) -> None:
        """Reset the mean of the loss."""
        self._train_sum, self._train_steps = None, 0

    def seed_step(self, step: int) -> None:
        """Seed dropout on this device only; `torch.manual_seed` records a stack for each kind of device it lacks."""
        seed = (self.config.seed * 1_000_003 + step * 1009 + self.placement.seed_offset(self)) % 2**63
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            getattr(torch, self.device.type).manual_seed(seed)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the loss of a batch; dropout is seeded by the step, so that a resumed run repeats it."""
        self.seed_step(self.global_step * self.config.accumulate + batch_idx % self.config.accumulate)
        if "weight" in batch:
            value = self.loss(batch["input"], batch["target"], batch["weight"])[0]
        else:
            value = self.placement.training_loss(self, batch["input"], batch["target"])
        kept = self.placement.mean_loss(value.detach())
        self._train_sum = kept if self._train_sum is None else self._train_sum + kept
        self._train_steps += 1
        alone_on_cpu = self.device.type == "cpu" and self.trainer.world_size == 1
        if alone_on_cpu or self._train_steps % LOOK == 0:  # looking waits for a GPU, and for other processes
            self.check_finite()
        return value

    def check_finite(self) -> None:
        """Raise a TrainingError, in all processes alike, if a loss of this epoch was not a finite number."""
        if self._train_sum is None:
            return
        total = self._train_sum
        if self.trainer.world_size > 1:
            total = self.trainer.strategy.reduce(total, reduce_op="sum")
        if not math.isfinite(float(total)):
            where = f"epoch {self.current_epoch}, step {self.global_step}"
            raise TrainingError(not_finite(float(total), where, self.config))

    def on_after_backward(self) -> None:
        """Average the gradients over the processes that hold the same labels."""
        self.placement.average_gradients(self.network)

    def train_loss(self) -> float:
        """Return the mean loss of this epoch so far."""
        return float(self._train_sum) / max(self._train_steps, 1) if self._train_sum is not None else math.nan

    def on_validation_epoch_start(self) -> None:
        """Reset the sums of the metrics."""
        self._sums = {"rows": 0.0, "labelled": 0.0, "valid_loss": 0.0}
        streams = _set_streams(self.network.n_labels) if self._measures_sets else {}
        self._streams = {name: stream.to(self.device) for name, stream in streams.items()}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add a batch to the sums of the metrics."""
        value, logits = self.loss(batch["input"], batch["target"])
        target = batch["target"]
        self._sums["rows"] += len(target)
        self._sums["valid_loss"] += float(value) * len(target)
        self._sums["labelled"] += float((target >= 0).any(-1).sum())
        at, best = list(self.resolved.at), decode_top_k(logits, max(self.resolved.at), shard=self.placement.shard)
        for name, function in AT_K.items():
            each = function(best.score.double(), label_lists(target), at, indices=best.index, reduction="none")
            for k, total in zip(at, each.nansum(0).tolist(), strict=True):
                self._sums[f"{name}@{k}"] = self._sums.get(f"{name}@{k}", 0.0) + total
        if self._measures_sets:
            y = probabilities(logits, self.resolved)[0]
            for stream in self._streams.values():
                stream.update(y, label_lists(target))

    def validation_metrics(self) -> dict[str, float]:
        """Return the metrics of the validation rows: means over the rows that have a label."""
        sums = dict(self._sums)
        rows, labelled = sums.pop("rows"), sums.pop("labelled")
        loss = sums.pop("valid_loss") / max(rows, 1)
        out = {"valid_loss": loss, **{name: value / max(labelled, 1) for name, value in sums.items()}}
        return out | {name: float(stream.compute()) for name, stream in self._streams.items()}

    def on_validation_epoch_end(self) -> None:
        """Pass the metrics to callbacks and loggers."""
        if not self.trainer.sanity_checking:
            self.log_dict(self.validation_metrics(), prog_bar=True, logger=self.to_loggers)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Bound the norm of the gradient."""
        self.placement.clip_gradients(self, optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_optimizers(self) -> Any:
        """Return the optimiser, with warm-up and cosine decay per step; biases have no weight decay."""
        config, lr = self.config, float(self.config.lr)
        matrices = [p for p in self.network.parameters() if p.ndim > 1]
        vectors = [p for p in self.network.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        if self.network.encoder is not None:
            groups = self.network.parameter_groups(config)  # type: ignore[operator]
        optimizer: torch.optim.Optimizer
        fused = all(p.device.type in ("cpu", "cuda") for p in matrices) and config.precision == "32"
        if config.optimizer == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=float(config.weight_decay), fused=fused)
        else:
            optimizer = torch.optim.SGD(
                groups, lr=lr, weight_decay=float(config.weight_decay), momentum=config.momentum, fused=fused
            )
        if self.optimizer_state is not None:
            optimizer.load_state_dict(self.optimizer_state)
            for group in optimizer.param_groups:  # the schedule starts again
                group["lr"] = group["initial_lr"] = lr
        warm = max(int(config.warmup * self.total_steps), 1)

        def factor(step: int) -> float:
            rise = min((step + 1) / warm, 1.0)
            if config.schedule == "constant":
                return rise
            return rise * 0.5 * (1 + math.cos(math.pi * min(step / self.total_steps, 1.0)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _set_streams(n_labels: int) -> dict[str, Any]:
    """Return the metrics of label sets: labels with a probability above 0.5."""
    from lastlayer.metrics.stream_sets import ExactMatch, HammingLoss, LabelSetF1

    options: dict[str, Any] = {"threshold": 0.5, "n_classes": n_labels}
    return {
        "micro_f1": LabelSetF1(average="micro", **options),
        "macro_f1": LabelSetF1(average="macro", **options),
        "sample_f1": LabelSetF1(average="samples", **options),
        "hamming_loss": HammingLoss(**options),
        "exact_match": ExactMatch(threshold=0.5),
    }


def fit_in_process(module: LabelSetModule, data: LabelSetData, epochs: int) -> torch.optim.Optimizer:
    """Take the steps of a Lightning Trainer on the CPU without its overhead; the weights are the same.

    The overhead is most of the time of a step of a small linear model. There are no validation, checkpoints or mixed
    precision.
    """
    made = module.configure_optimizers()
    optimizer: torch.optim.Optimizer = made["optimizer"]
    schedule = made["lr_scheduler"]["scheduler"]
    batches = data.train_dataloader().sampler
    assert isinstance(batches, EpochBatches)
    step = 0
    module.train()
    x = data.train_rows.x
    pairs = module.config.batch_size * getattr(x, "nnz", 0) / max(x.shape[0], 1)
    lazy = LazyRows(module.network, optimizer) if worthwhile(module.network, optimizer, pairs) else None
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for rows in batches:
            batch = data.train_rows[rows]
            module.seed_step(step)
            optimizer.zero_grad()
            logits = module.network(batch["input"]) if lazy is None else lazy.logits(batch["input"])
            value = module.loss_of(logits.float(), batch["target"], batch.get("weight"))
            if not math.isfinite(value.item()):
                raise TrainingError(not_finite(value.item(), f"epoch {epoch}, step {step}", module.config))
            value.backward()
            (optimizer if lazy is None else lazy).step()
            schedule.step()
            step += 1
    if lazy is not None:
        lazy.finish()
    return optimizer
