"""The rule of targets: the dtype tells what a target holds, and no value is read."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lastlayer as ll
from lastlayer import _check
from lastlayer.shard import ClassShard

LISTS = torch.tensor([[0, 2, -1], [1, -1, -1]])
HOT = torch.tensor([[1, 0, 1], [0, 1, 0]])
X = torch.tensor([[1.0, 0.5, -2.0], [0.0, 3.0, 1.0]])


def test_lists_as_wide_as_the_classes_mean_what_wider_lists_mean():
    wider = torch.nn.functional.pad(LISTS, (0, 1), value=-1)
    expected = ll.lml_loss(X, wider, k=2)
    assert torch.equal(ll.lml_loss(X, ll.label_lists(LISTS), k=2), expected)
    for dtype in (torch.float32, torch.float64, torch.bool, torch.int8, torch.uint8):
        assert torch.equal(ll.lml_loss(X, HOT.to(dtype), k=2), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("function", [ll.lml_loss, ll.binary_loss, ll.recall_at_k, ll.tune_thresholds, ll.auroc])
def test_an_ambiguous_target_is_refused(function, dtype):
    sizes = {ll.lml_loss: (2,), ll.recall_at_k: (2,)}.get(function, ())
    message = r"may be multi-hot or index lists.*`target\.float\(\)` or `target\.bool\(\)`.*`ll\.label_lists\(target\)`"
    for target in (HOT, LISTS):
        with pytest.raises(TypeError, match=message):
            function(X, target.to(dtype), *sizes)
    function(X, HOT.bool(), *sizes)
    function(X, ll.label_lists(LISTS.to(dtype)), *sizes)


def test_forms_by_dtype():
    for dtype in (torch.int64, torch.int32):
        assert _check.target("op", torch.tensor([0, 2], dtype=dtype), X).index.tolist() == [[0], [2]]
        assert _check.target("op", LISTS[:, :2].to(dtype), X).index.shape == (2, 2)
    assert _check.target("op", HOT.to(torch.int8), X).index is None
    marked = _check.target("op", ll.label_lists(torch.tensor([2])), X[0])  # one row, without a batch
    assert marked.index.tolist() == [2]
    # Without classes both readings agree.
    assert _check.target("op", torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0)).count().tolist() == [0, 0]


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (torch.zeros(2), TypeError, r"class indices.*int64 or int32, got torch\.float32.*target\.long"),
        (torch.zeros(2, 2, dtype=torch.bool), TypeError, r"class indices.*got torch\.bool"),
        (LISTS.to(torch.int16), TypeError, r"must be of int64 or int32.*float, bool, int8 or uint8.*got torch\.int16"),
        (HOT.to(torch.complex64), TypeError, r"got torch\.complex64"),
        (HOT.float().to_sparse(), TypeError, r"must be a dense tensor, got torch\.sparse_coo"),
        (torch.zeros(3, 3), ValueError, r"must have shape \(2, 3\) \(multi-hot\), \(2,\) \(one class per row\)"),
        (torch.zeros(3, dtype=torch.int64), ValueError, r"or \(2, m\) \(index lists padded with -1\), got \(3,\)"),
        ([[0, 1], [2, 2]], TypeError, r"must be a tensor, got list"),
    ],
)
def test_refused_targets(target, error, message):
    with pytest.raises(error, match=message):
        _check.target("op", target, X)


def test_marking_checks_its_input():
    assert ll.label_lists(ll.label_lists(LISTS)).index is LISTS
    with pytest.raises(TypeError, match=r"label_lists: `target` must be a tensor of int64 or int32, got torch\.bool"):
        ll.label_lists(HOT.bool())
    with pytest.raises(TypeError, match="got list"):
        ll.label_lists([[0]])
    with pytest.raises(ValueError, match=r"must have shape \(\*batch, m\)"):
        ll.label_lists(torch.tensor(1))


def test_a_slice_of_the_classes_reads_no_value():
    """On a meta tensor there is no value; the same rule holds for a slice as for all classes."""
    shard, lists = ClassShard(3, 6), LISTS.to("meta")
    with pytest.raises(TypeError, match="index lists"):
        _check.target("op", lists, X.to("meta"), shard)
    assert _check.target("op", ll.label_lists(lists), X.to("meta"), shard).dense is None
    assert _check.target("op", ll.label_lists(LISTS + 3), X, shard).index.tolist() == [[2, 0, -1], [1, -1, -1]]


def test_a_mark_survives():
    marked = ll.label_lists(LISTS)
    for kept in (
        marked.to("meta"),
        marked.to(torch.int32),
        marked.cpu(),
        marked[1:],
        marked[torch.tensor([True, False])],
        copy.deepcopy(marked),
        pickle.loads(pickle.dumps(marked)),
    ):
        assert isinstance(kept, _check.LabelLists)
    assert (marked.shape, len(marked), marked.device, marked.dtype) == ((2, 3), 2, LISTS.device, torch.int64)
    for workers in (0, 1):
        ((x, target),) = DataLoader(TensorDataset(X, marked), batch_size=2, num_workers=workers)
        assert torch.equal(target.index, LISTS)
        assert torch.equal(x, X)


def test_a_mark_in_transforms():
    def loss(x, target):
        return ll.binary_loss(x, target, reduction="none")

    expected, marked = loss(X, HOT.bool()), ll.label_lists(LISTS)
    assert torch.equal(torch.func.vmap(loss)(X, marked), expected)
    assert torch.equal(torch.func.vmap(lambda x, t: loss(x, ll.label_lists(t)))(X, LISTS), expected)
    assert torch.equal(torch.compile(loss, fullgraph=True, backend="eager")(X, marked), expected)
    inside = torch.compile(lambda x, t: loss(x, ll.label_lists(t)), fullgraph=True, backend="eager")
    assert torch.equal(inside(X, LISTS), expected)

    class Step(torch.nn.Module):
        def forward(self, x, target):
            return loss(x, target)

    assert torch.equal(torch.export.export(Step(), (X, marked)).module()(X, marked), expected)


@pytest.mark.parametrize("target", [LISTS[:, :2], HOT.float(), HOT[:, 0].long()], ids=["lists", "multi-hot", "one"])
def test_a_target_or_mask_elsewhere_is_refused(target):
    for reduction in ("mean", "none"):
        with pytest.raises(ValueError, match="`target` must be on the device of the scores, cpu, got meta"):
            ll.lml_loss(X.clone().requires_grad_(), target.to("meta"), k=2, reduction=reduction)
    with pytest.raises(ValueError, match="`mask` must be on the device of the scores, cpu, got meta"):
        ll.lml(X, 2, mask=torch.ones(3, dtype=torch.bool, device="meta"))
    with pytest.raises(ValueError, match="recall_at_k: `target` must be on the device"):
        ll.recall_at_k(X, target.to("meta"), 1)
