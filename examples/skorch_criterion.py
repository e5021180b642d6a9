"""skorch with a loss of the package as its criterion.

pip install skorch; python examples/skorch_criterion.py
"""

import numpy as np
import torch
from skorch import NeuralNet
from torch import nn

import lastlayer as ll


def main(epochs: int = 30) -> float:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(800, 20)).astype(np.float32)
    scores = x @ rng.normal(size=(20, 12))
    labels = np.argsort(-scores)[:, :3].astype(np.int64)  # index lists; a multi-hot matrix does as well
    net = NeuralNet(
        nn.Linear, module__in_features=20, module__out_features=12,
        criterion=ll.LMLLoss, criterion__k=3, optimizer=torch.optim.AdamW, lr=0.05, max_epochs=epochs,
        batch_size=64, train_split=None, verbose=0,
    )  # fmt: skip
    net.fit(x[:600], labels[:600])
    logits = torch.from_numpy(net.predict(x[600:]))
    recall = float(ll.recall_at_k(logits, torch.from_numpy(labels[600:]), 3))
    print(f"recall@3: {recall:.3f}")
    return recall


if __name__ == "__main__":
    main()
