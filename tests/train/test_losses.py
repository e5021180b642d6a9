"""The table of the losses says what the functions do."""

import inspect

import pytest

import lastlayer as ll
from lastlayer.train import Config, ConfigError
from lastlayer.train.losses import LOSSES, loss_function, takes_shard

# Parameters that the trainer sets itself, or that are tensors and no setting of a run.
OURS = {"logits", "target", "k", "observed", "shard", "reduction", "data_group", "mask", "generator"}
TENSORS = {"weight", "sample_weight", "pos_weight", "row_weight", "pseudo_target", "log_normalizer"}


@pytest.mark.parametrize("name", [name for name, facts in LOSSES.items() if facts.exact != "only"])
def test_the_facts_are_those_of_the_function(name):
    facts, function = LOSSES[name], loss_function(name)
    assert function is getattr(ll, f"{name}_loss")
    parameters = inspect.signature(function).parameters
    needs_k = "k" in parameters and parameters["k"].default is inspect.Parameter.empty
    assert facts.k == (("whole" if parameters["k"].annotation == "int" else "real") if needs_k else "none")
    assert not takes_shard(name) or "shard" in parameters
    assert facts.observed == ("observed" in parameters)
    assert facts.options == {n: p.default for n, p in parameters.items() if n not in OURS | TENSORS}


def test_no_loss_of_logits_and_target_is_missing():
    found = []
    for name in ll.loss.__all__:
        if name.endswith("_loss"):
            parameters = inspect.signature(getattr(ll.loss, name)).parameters.values()
            needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
            if needed in (["logits", "target"], ["logits", "target", "k"]):
                found.append(name.removesuffix("_loss"))
    known = {*found, "squared_hinge"}  # which only the exact solver has
    assert known == set(LOSSES), f"lastlayer/train/losses.py has no line for {known - set(LOSSES)}"


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("nope", "", "`loss` must be one of auto, assume_negative, asymmetric"),
        ("lml", "tau=2", "`loss_options` of lml must be among temperature, impl, got 'tau'"),
        ("warp", "exact=2", "exact must be true or false, got 2"),
        ("lml", "temperature=hot", "temperature must be a number, got 'hot'"),
        ("lml", "temperature=0", "temperature must be positive, got 0"),
        ("two_way", "per=1", "per must be a word, got 1"),
    ],
)
def test_messages(loss, options, message):
    with pytest.raises(ConfigError, match=message):
        Config(loss=loss, loss_options=options)
