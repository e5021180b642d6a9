"""Why a label: exact for linear models, gradient x input for networks, and what predict --explain writes."""

import json

import pytest
import scipy.sparse as sp
import torch
from train_tools import make_rows

from lastlayer.cli import main
from lastlayer.train import Config, LabelSetNetwork, load, train
from lastlayer.train.explain import contributions, explain, strongest


def network(hidden=(), sparse=False):
    torch.manual_seed(0)
    made = LabelSetNetwork(7, 4, hidden=hidden, sparse=sparse, dropout=0.5).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("hidden", [(), (5,), (5, 3)])
@pytest.mark.parametrize("sparse", [False, True])
def test_is_the_value_times_the_gradient_by_autograd(hidden, sparse):
    made = network(hidden, sparse)
    x = torch.randn(3, 7) * (torch.rand(3, 7) < 0.6)
    index = torch.tensor([[0, 3], [1, 1], [2, 0]])
    found = contributions(made, sp.csr_matrix(x.numpy()) if sparse else x.numpy(), index)
    leaf = x.clone().requires_grad_()
    logits = made(leaf)
    for i in range(3):
        for j in range(2):
            (slope,) = torch.autograd.grad(logits[i, index[i, j]], leaf, retain_graph=True)
            torch.testing.assert_close(found[i, j], slope[i] * x[i])
    if not hidden:
        torch.testing.assert_close(found.sum(-1) + made.bias[index], logits.gather(1, index))


def test_words_that_speak_for_a_label_and_against_it(tmp_path, capsys):
    config = Config(loss="squared_hinge", bootstrap=0, accelerator="cpu")
    run = train({"all": make_rows(300)}, config, tmp_path / "run")
    model = load(run.path)
    texts = ["word1 noise3 word4"]
    x = model.matrix(texts)
    (one,) = explain(model, x, [["label1", "label0"]], most=2)
    assert one[0].speaks_for[0][0] == "word1"
    assert "word1" in [word for word, _ in one[1].against]
    with pytest.raises(ValueError, match="`labels` must be labels of the model, got 'other'"):
        explain(model, x, [["label1", "other"]])
    whole = explain(model, x, [["label1"]], most=100)[0][0]
    bias = model.scorer.network.bias[model.labels.index("label1")].item()
    total = sum(value for _, value in [*whole.speaks_for, *whole.against]) + bias
    assert total == pytest.approx(float(model.decision_function(texts)[0, model.labels.index("label1")]), abs=1e-4)
    assert strongest(model, model.labels.index("label2"), 1).speaks_for[0][0] == "word2"
    (tmp_path / "new.txt").write_text(texts[0] + "\n")
    assert main(["predict", str(run.path), str(tmp_path / "new.txt"), "-k", "2", "--explain", "1"]) == 0
    said = json.loads(capsys.readouterr().out)["labels"]
    assert {label["label"]: label["for"][0]["feature"] for label in said} == {"label1": "word1", "label4": "word4"}
    out = str(tmp_path / "o.csv")
    assert (
        main(["predict", str(run.path), str(tmp_path / "new.txt"), "--explain", "--format", "csv", "--out", out]) == 0
    )
    assert (tmp_path / "o.csv").read_text().splitlines()[0] == "row,id,rank,label,probability,for,against"


@pytest.mark.parametrize("hidden", [(), (16,)])
def test_reasons_are_stored_for_the_report(tmp_path, hidden):
    from lastlayer.report import write
    from lastlayer.runs.contents import read

    config = Config(loss="binary", epochs=6, bootstrap=0, accelerator="cpu", hidden=hidden)
    run = train({"all": make_rows(300)}, config, tmp_path / "run")
    stored, model, rows = run.read_json("reasons.json"), load(run.path), run.examples()
    assert stored["exact"] == (not hidden)
    own = stored["labels"][str(model.labels.index("label2"))][0]
    if hidden:  # the mean over the stored rows
        total = dict.fromkeys(model.features.state["vocabulary"], 0.0)
        texts = [rows[int(i)]["text"] for i, why in stored["rows"].items() if str(model.labels.index("label2")) in why]
        for (one,) in explain(model, model.matrix(texts), [["label2"]] * len(texts), most=100):
            for name, value in [*one.speaks_for, *one.against]:
                total[name] += value / len(stored["rows"])
        best = max(total, key=total.get)
        assert own[0] == [best, pytest.approx(total[best], rel=0.01)]
    else:
        assert own[0][0] == "word2"
    row, why = next(iter(stored["rows"].items()))
    label = next(iter(why))
    (reason,) = explain(model, model.matrix([rows[int(row)]["text"]]), [[model.labels[int(label)]]], most=4)[0]
    assert [name for name, _ in why[label][0]] == [name for name, _ in reason.speaks_for]
    assert [value for _, value in why[label][1]] == pytest.approx([v for _, v in reason.against], rel=0.01)
    page = write(run.path, tmp_path / "report.html").read_text()
    assert '"w":[[' in page
    assert f'"exact":{str(not hidden).lower()}' in page
    run.write_json("reasons.json", {"rows": {"0": {"1": 3}}, "labels": {}})
    with pytest.raises(ValueError, match=r"reasons.json: damaged"):
        read([run.path])
