import pytest
import torch

from lastlayer import shard as sharding
from lastlayer.shard import ClassShard


@pytest.mark.parametrize(("start", "stop"), [(3, 2), (-1, 2)])
def test_slice_message(start, stop):
    with pytest.raises(ValueError, match="`start` and `stop` must satisfy 0 <= start <= stop, got"):
        ClassShard(start, stop)


def test_without_a_shard_nothing_is_sent():
    x = torch.tensor([[3.0, 1.0, 2.0]], requires_grad=True)
    assert sharding.total(x, None) is sharding.spread(x, None) is sharding.replicate(x, None) is x
    assert sharding.gather(x, None) is x
    low, high = sharding.reduce([-x, x], "max", None)
    assert (low.item(), high.item()) == (-1, 3)
    assert sharding.reduce(x[:, :0], "min", None).item() == torch.inf
    ranks = torch.tensor([[1.0, 3.0, 9.0]])
    assert sharding.kth_largest(x, ranks, None).tolist() == [[3.0, 1.0, 1.0]]


def test_limit_is_noted_for_numbers_alone():
    shard = ClassShard(2, 5)
    assert sharding.limited(shard, 3).limit == 4
    assert sharding.limited(shard, 2.5).limit == 3
    assert sharding.limited(shard, 3) == shard
    assert sharding.limited(shard, torch.tensor(3.0)).limit is None
    assert sharding.limited(None, 3) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_keep_the_order(dtype):
    limits = torch.finfo(dtype)
    x = torch.tensor([-torch.inf, limits.min, -1.0, -limits.tiny, 0.0, 1e-30, 1.0, limits.max, torch.inf], dtype=dtype)
    keys = sharding._keys(x)
    assert (keys[1:] > keys[:-1]).all()
    assert torch.equal(sharding._values(keys, dtype), x)
