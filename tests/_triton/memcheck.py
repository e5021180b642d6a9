"""Each GPU kernel once, for a tool that watches memory and takes its time.

compute-sanitizer --tool memcheck python tests/_triton/memcheck.py
"""

import torch

import lastlayer as ll
from lastlayer.loss import _scan

DEVICE = "cuda"


def both_passes(rows, n, k):
    x = torch.randn(rows, n, device=DEVICE, requires_grad=True)
    target = torch.randint(n, (rows, 2), device=DEVICE)
    ll.lml(x, k).backward(torch.randn_like(x))
    ll.lml_loss(x, target, k).backward()
    torch.cuda.synchronize()
    print("projection and loss", rows, n, flush=True)


def linear_loss(rows, n, observed):
    features = torch.randn(rows, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(n, 16, device=DEVICE, requires_grad=True)
    target = torch.randint(n, (rows, 3), device=DEVICE)
    ll.linear_lml_loss(features, weight, target, 5, observed=observed).backward()
    torch.cuda.synchronize()
    print("linear", rows, n, flush=True)


def others(rows, n):
    x = torch.randn(rows, n, device=DEVICE, requires_grad=True)
    target = torch.rand(rows, n, device=DEVICE) < 0.05
    loss = ll.two_way_loss(x, target) + ll.asymmetric_loss(x, target) + ll.binary_loss(x, target)
    loss = loss + ll.lml_fenchel_young_loss(x, target) + ll.loss.quasibinary_loss(x, target)
    loss = loss + ll.loss.truncated_entropy_loss(x, target, 5) + ll.loss.smooth_topk_svm_loss(x, target, 5)
    loss = loss + ll.loss.warp_loss(x, target)
    for function in (ll.two_way_loss, ll.lml_fenchel_young_loss, ll.loss.quasibinary_loss):
        loss = loss + function(x, target, reduction="none").sum()
    loss = loss + ll.loss.smooth_topk_svm_loss(x, target, 16)
    for y in (ll.capped_softmax(x, 3), ll.capped_sparsemax(x, 3), ll.lml_at_most(x, 3)):
        loss = loss + y.square().sum()
    for k in (3, 16):
        loss = loss + ll.subset_marginals(x, k).square().sum()
    loss.backward()
    torch.cuda.synchronize()
    print("other losses and projections", rows, n, flush=True)


def budgets(rows, n):
    """Weights and bounds: shared and per row, of either sign, masked; values and gradients."""
    x = torch.randn(rows, n, device=DEVICE, requires_grad=True)
    mask = torch.rand(rows, n, device=DEVICE) < 0.9
    weight = torch.randn(n, device=DEVICE).abs() + 0.1
    upper = 0.5 + torch.rand(n, device=DEVICE)
    signs = torch.where(torch.rand(rows, n, device=DEVICE) < 0.5, -weight, weight)
    for function, k, terms in (
        (ll.lml, 0.2 * n, {"weight": weight}),
        (ll.lml, 0.9 * float(weight.sum()), {"weight": weight}),
        (ll.lml_at_most, 0.1 * n, {"weight": weight, "upper": upper, "lower": 0.1 * upper}),
        (ll.lml, 1.0, {"weight": signs[0]}),
        (ll.lml, 1.0, {"weight": signs, "mask": mask}),
    ):
        leaves = {name: t.clone().requires_grad_() for name, t in terms.items() if name != "mask"}
        y = function(x, k, impl="triton", **(terms | leaves))
        y.nan_to_num().square().sum().backward()
    infinite = x.detach().clone()
    infinite[0, 1], infinite[1, 2] = -torch.inf, torch.inf
    ll.lml(infinite, 3.0, weight=weight, impl="triton")
    torch.cuda.synchronize()
    print("weights and bounds", rows, n, flush=True)


def ahead_of_time(rows, n):
    """Rows with shared weights, more of them than programs, whose next scores are on their way."""
    from lastlayer._triton import plan, weighted

    plan.PATIENCE, fit, programs = 1, weighted._fit, weighted._programs
    x, weight = torch.randn(rows, n, device=DEVICE), torch.rand(n, device=DEVICE) + 0.5
    weighted._programs = lambda *_: 3
    for number in (0, 1, 2, 3):
        weighted._fit = lambda *_, number=number: (128, number)
        ll.lml(x, 3.0, weight=weight, upper=weight / 2)
    weighted._fit, weighted._programs, plan.PATIENCE = fit, programs, 3
    torch.cuda.synchronize()
    print("weights ahead of time", rows, n, flush=True)


def steps(rows, n):
    """Training steps until they take the short way."""
    x = torch.randn(rows, n, device=DEVICE, requires_grad=True)
    hot = (torch.rand(rows, n, device=DEVICE) < 0.1).float()
    for _ in range(6):
        ll.lml_loss(x, torch.zeros(rows, dtype=torch.int64, device=DEVICE), 3).backward()
        ll.lml_loss(x, hot, 3, observed=0.5).backward()
    torch.cuda.synchronize()
    print("training steps", rows, n, flush=True)


def two_way(rows, n):
    """Columns in several parts, and soft labels."""
    x = torch.randn(rows, n, device=DEVICE, requires_grad=True)
    hot = (torch.rand(rows, n, device=DEVICE) < 0.1).float()
    (ll.two_way_loss(x, hot) + ll.two_way_loss(x, 0.7 * hot)).backward()
    torch.cuda.synchronize()
    print("two-way", rows, n, flush=True)


def balanced(rows, columns, k):
    x = 3 * torch.randn(rows, columns, device=DEVICE, requires_grad=True)
    ll.lml_balanced(x, k).square().sum().backward()
    torch.cuda.synchronize()
    print("balanced", rows, columns, flush=True)


def main():
    from lastlayer._triton import (
        lml_backward,
        plan,
        weighted,
    )  # here: doctests import this file where there is no triton

    torch.manual_seed(0)
    both_passes(4, 37, torch.tensor([1.0, 11.1, 36.5, 0.5], device=DEVICE))
    both_passes(4, 333, 3.0)
    others(4, 37)
    others(3, 333)
    two_way(600, 37)
    steps(7, 40)
    ahead_of_time(61, 28)
    budgets(5, 37)
    weighted.LONGEST = 512
    budgets(3, 1000)
    for rows, columns, k in ((300, 20, 3.5), (2200, 1024, 8)):
        balanced(rows, columns, k)
    plan.LONGEST = lml_backward.LONGEST = 1024
    plan.CHUNK = 8192
    for split in (False, True):
        plan.is_split = lambda rows, n, split=split: split
        both_passes(4, 9001, torch.tensor([1.0, 2700.3, 9000.5, 0.5], device=DEVICE))
    _scan.TILE["cuda"] = 1 << 16
    for observed in (0.0, 0.3):
        linear_loss(5, 20011, observed)


if __name__ == "__main__":
    main()
