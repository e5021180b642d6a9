"""A plain PyTorch loop: the one line that changes is the loss.

python examples/plain_loop.py
"""

import torch
from torch import nn

import lastlayer as ll


def make(n: int = 600, features: int = 20, classes: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with three labels each, of which two are seen."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator)
    weight = torch.randn(features, classes, generator=torch.Generator().manual_seed(99))
    labels = (x @ weight).topk(3).indices
    return x, labels[torch.arange(n)[:, None], torch.rand(n, 3, generator=generator).argsort(-1)]


def main(epochs: int = 30) -> float:
    torch.manual_seed(0)
    x, labels = make()
    seen = labels[:, :2]  # one label of three was never written down
    model = nn.Linear(x.shape[1], 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            loss = ll.lml_loss(model(x[rows]), seen[rows], k=3, observed=2 / 3)  # was F.cross_entropy(...)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    test, truth = make(seed=1)
    with torch.no_grad():
        logits = model(test)
        best, probability = ll.decode_top_k(ll.lml(logits, k=3), 3)
        recall = float(ll.recall_at_k(logits, truth, 3))
    print("first row:", best[0].tolist(), [round(p, 2) for p in probability[0].tolist()], "truth:", truth[0].tolist())
    print(f"recall@3 on all labels: {recall:.3f}")
    return recall


if __name__ == "__main__":
    main()
