"""The Lightning parts: rows to batches, and the training step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lastlayer.data import LabelData
from lastlayer.decode.top_k import decode_top_k
from lastlayer.head.linear import ShardedLinear
from lastlayer.shard import ClassShard, reduce, total
from lastlayer.train.config import Config, ConfigError
from lastlayer.train.losses import LOSSES, loss_function
from lastlayer.train.network import Input, LabelSetNetwork


@dataclass(frozen=True)
class Resolved:
    """What "auto" became for given training labels."""

    k: float | None  # None: predicted a row
    mean_count: float
    observed: float
    loss: str
    probability: str
    monitor: str
    at: tuple[int, ...]

    @classmethod
    def of(cls, config: Config, data: LabelData) -> Resolved:
        """Choose from the label counts.

        With complete labels k is the mean number of labels a row. With incomplete ones that is too low: k is the 90th
        percentile of the counts, and the observed share the mean count divided by k.
        """
        counts, n = data.row_counts(), data.n_labels
        mean = float(counts.mean()) if len(counts) else 0.0
        incomplete = config.labels == "incomplete"
        guess = float(np.quantile(counts, 0.9)) if incomplete and len(counts) else mean
        guess = min(max(guess, mean, 0.5), 0.5 * n if n > 1 else 0.5)
        k = guess if config.k in ("auto", "predicted") else float(config.k)
        if k > n:
            raise ConfigError(f"`k` must be at most the number of labels, {n}, got {config.k}.")
        share = min(mean / k, 0.99) if incomplete else 0.0
        observed = share if config.observed == "auto" else float(config.observed)
        probability = config.probability
        if probability == "auto":
            probability = LOSSES[config.loss].probability
        at = tuple(a for a in config.at if a <= n) or (1,)
        monitor = config.monitor
        if monitor == "auto":
            monitor = f"{'recall' if incomplete else 'ndcg'}@{at[-1]}"
        allowed = [f"{m}@{a}" for m in ("precision", "recall", "ndcg") for a in at]
        if monitor not in [*allowed, "valid_loss"]:
            raise ConfigError(f"`monitor` must be one of {', '.join(allowed)}, valid_loss, got {monitor!r}.")
        fixed = None if config.k == "predicted" else k
        return cls(
            fixed, min(max(mean / (observed or 1), 0.01), 0.99 * n), observed, config.loss, probability, monitor, at
        )


class Rows(Dataset):
    """Rows as batches: asked for a list of row numbers, it gives the whole batch at once."""

    def __init__(self, x: Any, labels: LabelData) -> None:
        self.x, self.labels = x, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        rows = np.asarray(rows, dtype=np.int64)
        return {"input": rows_to_input(self.x, rows), "target": torch.from_numpy(self.labels.padded(rows))}


def rows_to_input(x: Any, rows: np.ndarray) -> Input:
    """Return rows of a dense array or CSR matrix as the network takes them."""
    if isinstance(x, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(x[rows], dtype=np.float32))
    start, stop = x.indptr[rows].astype(np.int64), x.indptr[rows + 1].astype(np.int64)
    counts = stop - start
    offsets = np.cumsum(counts) - counts
    place = np.repeat(start - offsets, counts) + np.arange(counts.sum())
    index = torch.from_numpy(x.indices[place].astype(np.int64))
    value = torch.from_numpy(x.data[place].astype(np.float32))
    return index, torch.from_numpy(offsets), value


class EpochBatches(Sampler[list[int]]):
    """Lists of row numbers; their order depends on the seed and the epoch alone, so that a resumed run repeats it."""

    def __init__(
        self, n: int, size: int, *, seed: int | None, rank: int = 0, world: int = 1, share: tuple[int, int] = (0, 1)
    ) -> None:
        self.n, self.size, self.seed, self.rank, self.world, self.epoch = n, size, seed, rank, world, 0
        self.share = share

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this at the start of each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return max(math.ceil(self.n / (self.size * self.world)), 1) if self.n else 0

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(self.n)
        if self.seed is not None:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.n)
        step = self.size * self.world
        for at in range(0, self.n, step):
            part = order[at : at + step]
            mine = part[self.rank :: self.world]
            mine = mine if len(mine) else part[:1]  # each rank takes part in each step
            first, of = self.share
            yield mine[first::of].tolist()


def _whole(batch: Any) -> Any:
    """Batches come whole from `Rows`."""
    return batch


class LabelSetData(pl.LightningDataModule):
    """Training and validation rows for a Lightning Trainer.

    Args:
        x: Training features, dense or CSR, float32.
        labels: The training label lists.
        valid_x: Validation features, or None.
        valid_labels: The validation label lists, or None.
        batch_size: Rows a step on each device.
        seed: Of the order of rows.
        share: Which part of each batch is taken, and of how many.
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

    def train_dataloader(self) -> DataLoader:
        """Return batches in an order that depends on seed and epoch."""
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        options = {"seed": self.seed, "rank": rank, "world": world, "share": self.share}
        batches = EpochBatches(len(self.train_rows), self.batch_size, **options)  # type: ignore[arg-type]
        return DataLoader(self.train_rows, sampler=batches, batch_size=None, collate_fn=_whole)

    def val_dataloader(self) -> Any:
        """Return the validation rows in order; every rank sees all, so that metrics are exact."""
        if self.valid_rows is None:
            return []
        batches = EpochBatches(len(self.valid_rows), max(self.batch_size, 256), seed=None)
        return DataLoader(self.valid_rows, sampler=batches, batch_size=None, collate_fn=_whole)


class LabelSetModule(pl.LightningModule):
    """A network with its loss and optimiser.

    Args:
        network: Rows to logits.
        config: The choices of the run.
        resolved: What "auto" became.
        total_steps: The steps of the whole run, for the schedule.
    """

    def __init__(self, network: LabelSetNetwork, config: Config, resolved: Resolved, *, total_steps: int) -> None:
        super().__init__()
        config = config.settled(network.sparse)
        self.network, self.config, self.resolved, self.total_steps = network, config, resolved, max(total_steps, 1)
        self.function = loss_function(resolved.loss)
        self.options = dict(config.loss_options)
        facts = LOSSES[resolved.loss]
        self.takes_k = facts.k != "none"
        self.labelled_alone = False  # rows without a label have no loss
        if facts.observed:
            self.options["observed"] = resolved.observed
            if config.labels == "incomplete" and resolved.observed:
                self.labelled_alone, self.options["reduction"] = True, "none"
        self.shard = network.shard
        self.in_blocks = False  # the loss without the logits of all labels
        self.data: ClassShard | None = None  # the processes that hold the same labels, each with a share of the rows
        if self.shard is not None:
            self.options["shard"] = self.shard
        self.k: Any = resolved.k
        if facts.k == "whole":
            if resolved.k is None:
                raise ConfigError(f"`k` must be a number for the loss {resolved.loss}, which takes whole numbers.")
            self.k = max(round(resolved.k), 1)
        self.optimizer_state: dict[str, Any] | None = None
        self._sums: dict[str, float] = {}
        self._train_sum: Tensor | None = None
        self._train_steps = 0

    def start_at_frequencies(self, labels: LabelData) -> None:
        """Set the output biases to the log-odds of the labels, and that of the count to the mean."""
        n, counts = len(labels), torch.from_numpy(labels.label_counts()).float()
        bias = ((counts + 0.5) / (n - counts + 0.5)).log()
        if self.network.count_head:
            share = torch.tensor([self.resolved.mean_count / self.network.n_labels])
            bias = torch.cat([bias, share.logit()])
        if self.shard is not None:
            bias = bias[self.shard.start : self.shard.stop]
        with torch.no_grad():
            self.network.output_bias().copy_(bias)

    def loss(self, rows: Input, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch and its logits."""
        logits, count = self.network(rows)
        logits = logits.float()
        if self.shard is not None and target.shape == logits.shape:
            target = nn.functional.pad(
                target, (0, 1), value=-1
            )  # lists as wide as the slice could be read as multi-hot
        if not self.takes_k:
            value = self.function(logits, target, **self.options)
        else:
            value = self.function(logits, target, self.k if count is None else count, **self.options)
        value = self._mean(value, target)
        if count is not None:  # a Poisson likelihood ties k to the number of labels; alone, the loss would raise it
            seen = (target >= 0).sum(-1) / (self.resolved.observed or 1.0)
            value = value + self.config.count_weight * nn.functional.poisson_nll_loss(count, seen, log_input=False)
        return value, logits

    def loss_in_blocks(self, rows: Input, target: Tensor) -> Tensor:
        """Return the LML loss of a batch as :meth:`loss` does, without its logits."""
        output = self.network.rest[-1]
        assert isinstance(output, ShardedLinear)
        if target.shape == (len(target), len(output.weight)):
            target = nn.functional.pad(target, (0, 1), value=-1)
        options = {n: value for n, value in self.options.items() if n in ("observed", "temperature", "reduction")}
        value = output.loss(self.network.before_output(rows), target, self.k, **options)
        return self._mean(value, target).float()

    def _mean(self, value: Tensor, target: Tensor) -> Tensor:
        """The mean over the rows of the batch, where those without a label have no loss if labels are incomplete.

        If a row has k labels and each is hidden alike, that none is seen does not say which they are. The thinned
        likelihood, which takes labels for independent, would draw the scores of the row together.
        """
        if not self.labelled_alone:
            return value
        return torch.where((target >= 0).any(-1), value.float(), 0).sum() / max(len(target), 1)

    def probabilities(self, rows: Input) -> tuple[Tensor, Tensor]:
        """Return probabilities and the expected number of labels a row."""
        from lastlayer.project.lml import lml

        logits, count = self.network(rows)
        logits = logits.float()
        if self.resolved.probability == "sigmoid":
            y = logits.sigmoid()
            return y, reduce(y, "sum", self.shard).squeeze(-1) if count is None else count
        k = logits.new_full(logits.shape[:1], float(self.resolved.k or 0)) if count is None else count
        return lml(logits, k, shard=self.shard, impl="torch" if torch.compiler.is_compiling() else "auto"), k

    def on_train_epoch_start(self) -> None:
        """Start the mean of the loss."""
        self._train_sum, self._train_steps = None, 0

    def seed_step(self, step: int) -> None:
        """Seed dropout, on this device alone: `torch.manual_seed` notes a stack for each kind it does not find."""
        place = self.global_rank if self.data is None else self.data.rank
        seed = (self.config.seed * 1_000_003 + step * 1009 + place) % 2**63
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            getattr(torch, self.device.type).manual_seed(seed)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the loss of a batch; dropout is seeded by the step, so that a resumed run repeats it."""
        self.seed_step(self.global_step)
        share = None if self.data is None else self.share_of_rows(batch["target"])
        if self.in_blocks:
            value = self.loss_in_blocks(batch["input"], batch["target"])
        elif share is not None and LOSSES[self.resolved.loss].needs_batch:
            return self._noted(self._two_way(batch["input"], batch["target"], share))
        else:
            value, _ = self.loss(batch["input"], batch["target"])
        return self._noted(value if share is None else value * share)

    def _noted(self, value: Tensor) -> Tensor:
        """Add to the mean of the epoch."""
        kept = value.detach()
        if self.data is not None:
            kept = total(kept, self.data) / self.data.ranks
        self._train_sum = kept if self._train_sum is None else self._train_sum + kept
        self._train_steps += 1
        return value

    def share_of_rows(self, target: Tensor) -> Tensor:
        """By how much the mean over this process's rows counts, so that the mean over processes is that of all rows."""
        every = LOSSES[self.resolved.loss].every_row or bool(self.options.get("observed"))
        counts = target.new_tensor(len(target)) if every else (target >= 0).any(-1).sum()
        here = counts.double().view(1, 1)
        assert self.data is not None
        return (here * self.data.ranks / reduce(here, "sum", self.data).clamp(min=1)).view(()).float()

    def _two_way(self, rows: Input, target: Tensor, share: Tensor) -> Tensor:
        """The sample term of this process's rows, and the class term of all of them."""
        assert self.data is not None
        logits = self.network(rows)[0].float()
        target = nn.functional.pad(target, (0, 1), value=-1) if target.shape == logits.shape else target
        options = {"per": "both", **self.options}
        per = options.pop("per")
        value = logits.sum() * 0
        if per != "class":
            value = value + share * self.function(logits, target, **options, per="sample")
        if per != "sample":
            value = value + self.function(logits, target, **options, per="class", data_group=self.data.group)
        return value

    def on_after_backward(self) -> None:
        """Average the gradients over the processes that hold the same labels."""
        if self.data is None:
            return
        for parameter in self.network.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = total(parameter.grad, self.data) / self.data.ranks

    def train_loss(self) -> float:
        """The mean loss of this epoch so far."""
        return float(self._train_sum) / max(self._train_steps, 1) if self._train_sum is not None else math.nan

    def on_validation_epoch_start(self) -> None:
        """Forget the sums of the last epoch."""
        self._sums = {"rows": 0.0, "labelled": 0.0, "valid_loss": 0.0}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add a batch to the sums of the metrics."""
        value, logits = self.loss(batch["input"], batch["target"])
        target = batch["target"]
        self._sums["rows"] += len(target)
        self._sums["valid_loss"] += float(value) * len(target)
        found = row_metrics(logits, target, self.resolved.at, self.shard)
        self._sums["labelled"] += float((target >= 0).any(-1).sum())
        for name, per_row in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(per_row.nansum())

    def validation_metrics(self) -> dict[str, float]:
        """The metrics of the validation rows: means over rows that have a label."""
        sums = dict(self._sums)
        rows, labelled = sums.pop("rows"), sums.pop("labelled")
        loss = sums.pop("valid_loss") / max(rows, 1)
        return {"valid_loss": loss, **{name: value / max(labelled, 1) for name, value in sums.items()}}

    def on_validation_epoch_end(self) -> None:
        """Hand the metrics to callbacks and loggers."""
        if not self.trainer.sanity_checking:
            self.log_dict(self.validation_metrics(), prog_bar=True, logger=True)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Bound the norm of the gradient, over the labels of all processes where they are split."""
        if self.shard is None or not gradient_clip_val:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        split = self.network.class_dims()
        grads = {name: p.grad for name, p in self.network.named_parameters() if p.grad is not None}
        zero = torch.zeros((), device=self.device)
        squares = total(sum((g.float().square().sum() for n, g in grads.items() if n in split), zero), self.shard)
        squares = sum((g.float().square().sum() for n, g in grads.items() if n not in split), squares)
        scale = (gradient_clip_val / (squares.sqrt() + 1e-6)).clamp(max=1)
        for grad in grads.values():
            grad.mul_(scale)

    def configure_optimizers(self) -> Any:
        """Return the optimiser with warm-up and cosine decay a step; biases are not decayed."""
        config, lr = self.config, float(self.config.lr)
        matrices = [p for p in self.network.parameters() if p.ndim > 1]
        vectors = [p for p in self.network.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
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


def fit_in_process(module: LabelSetModule, data: LabelSetData, epochs: int) -> torch.optim.Optimizer:
    """Take the steps of a Lightning Trainer on the CPU, and the same weights from them, without what it adds to each.

    Of a small linear model that is most of a step. No validation, checkpoints or mixed precision.
    """
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    batches = data.train_dataloader().sampler
    assert isinstance(batches, EpochBatches)
    step = 0
    module.train()
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for rows in batches:
            batch = data.train_rows[rows]
            module.seed_step(step)
            optimizer.zero_grad()
            module.loss(batch["input"], batch["target"])[0].backward()
            optimizer.step()
            schedule.step()
            step += 1
    return optimizer


def row_metrics(
    scores: Tensor, target: Tensor, at: tuple[int, ...], shard: ClassShard | None = None
) -> dict[str, Tensor]:
    """Return precision, recall and nDCG at each k for each row; nan for a row without labels.

    `target` holds index lists. The means over rows are those of :mod:`lastlayer.metrics`.
    """
    if shard is not None:
        top = decode_top_k(scores, max(at), shard=shard).index
        top = torch.where(top < 0, -2, top)  # -1 is what pads the target
    else:
        top = scores.topk(min(max(at), scores.shape[-1]), -1).indices
    return top_metrics(top, target, at)


def top_metrics(top: Tensor, target: Tensor, at: tuple[int, ...]) -> dict[str, Tensor]:
    """As :func:`row_metrics`, from the best classes of each row, best first."""
    hit = (top.unsqueeze(-1) == target.unsqueeze(-2)).any(-1).double()
    count = (target >= 0).sum(-1).double()
    none = torch.where(count > 0, 0.0, torch.nan)
    discount = 1 / torch.arange(2, max(at) + 2, device=top.device, dtype=torch.float64).log2()
    ideal = discount.cumsum(0)
    out = {}
    for k in at:
        right = hit[:, :k].sum(-1)
        out[f"precision@{k}"] = right / k + none
        out[f"recall@{k}"] = right / count.clamp(min=1) + none
        best = ideal[(count.clamp(1, k) - 1).long()]
        out[f"ndcg@{k}"] = (hit[:, :k] * discount[: min(k, hit.shape[1])]).sum(-1) / best + none
    return out
