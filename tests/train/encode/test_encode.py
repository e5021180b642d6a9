"""Encoders: fine-tuned and frozen, on texts and images; resumed, loaded again; and what is refused."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from encoder_tools import import_images, save_bert, save_images, save_vit, write_rows
from torch import nn
from train_tools import make_rows

import lastlayer as ll
from lastlayer.cli import main
from lastlayer.data import LabelData
from lastlayer.runs import RunFolder
from lastlayer.train import Config, ConfigError, evaluate, train
from lastlayer.train.encode import Encoder, frozen, open_encoder, source
from lastlayer.train.encode.encoder import by_depth, encode
from lastlayer.train.encode.image import Format
from lastlayer.train.export import description
from lastlayer.train.start import opened

pytest.importorskip("transformers")
QUICK = {"epochs": 2, "batch_size": 32, "bootstrap": 0, "lr": 0.002, "accelerator": "cpu"}


@pytest.fixture(scope="module")
def rows() -> LabelData:
    return make_rows(160)


@pytest.fixture(scope="module")
def bert(tmp_path_factory, rows):
    return save_bert(tmp_path_factory.mktemp("models") / "bert", rows.texts)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, rows, bert):
    config = Config(encoder=str(bert), **{**QUICK, "epochs": 12, "lr": 0.005})
    return train({"all": rows}, config, tmp_path_factory.mktemp("runs") / "tuned")


def value(run: RunFolder, name: str) -> float:
    return run.metrics()["metrics"][name]["value"]


def test_a_text_model_is_trained_and_loaded_without_the_folder_it_came_from(tuned, rows, bert, tmp_path):
    assert value(tuned, "ndcg@5") > 0.8  # the label frequencies alone reach 0.67
    copy = shutil.copytree(tuned.path, tmp_path / "run")
    before, after = source.open_folder(bert, Config()), source.open_folder(copy / "encoder", Config())
    assert not torch.equal(
        before.model.embeddings.word_embeddings.weight, after.model.embeddings.word_embeddings.weight
    )
    model = ll.load(copy)
    chosen = model.predict_proba(rows.texts[:40])
    one_by_one = np.concatenate([model.predict_proba([text]) for text in rows.texts[:40]])
    np.testing.assert_allclose(chosen, one_by_one, atol=1e-5)  # padding has no effect
    stored = RunFolder(copy).predictions()
    assert stored["probability"].shape[1] == 6
    assert evaluate(copy, rows)["metrics"]["ndcg@5"]["value"] > 0.8
    assert (
        "16 features from the encoder bert, which was trained with the labels" in (copy / "model_card.md").read_text()
    )


def test_the_commands_work_on_a_run_with_an_encoder(tuned, rows, tmp_path, capsys):
    table = write_rows(tmp_path / "rows.tsv", rows.take(np.arange(20)))
    assert main(["evaluate", str(tuned.path), str(table)]) == 0
    assert main(["predict", str(tuned.path), str(table)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(lines) == 20
    assert all(line["labels"] for line in lines)
    assert main(["report", str(tuned.path), "--out", str(tmp_path / "report.html")]) == 0
    assert main(["predict", str(tuned.path), str(table), "--explain"]) == 2
    assert "must be linear or a network" in capsys.readouterr().err
    assert main(["export", str(tuned.path)]) == 2
    assert "an encoder has no export here" in capsys.readouterr().err


def test_a_run_that_is_stopped_ends_with_the_weights_of_one_that_is_not(rows, bert, tmp_path, monkeypatch):
    config = Config(encoder=str(bert), accumulate=2, layer_decay=0.7, dropout=0.1, hidden=(8,), **QUICK)
    whole = train({"all": rows}, config, tmp_path / "whole")

    def stop(line):
        if line["epoch"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train({"all": rows}, config, tmp_path / "stopped", say=stop)
    assert (tmp_path / "stopped/checkpoints/last.ckpt").exists()  # of the first epoch
    resumed = train({"all": rows}, config, tmp_path / "stopped")
    for name in ("weights.safetensors", "encoder/model.safetensors"):
        expected, found = whole.read_tensors(name), resumed.read_tensors(name)
        assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_accumulated_gradients_are_those_of_the_larger_batch(rows, bert, tmp_path):
    plain = {**QUICK, "epochs": 1, "encoder": str(bert), "valid_fraction": 0.0, "test_fraction": 0.0, "loss": "binary"}
    still = {"optimizer": "sgd", "lr": 0.01, "momentum": 0.0}
    folder = tmp_path / "still"
    shutil.copytree(bert, folder)
    about = json.loads((folder / "config.json").read_text())
    about |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(about))
    found = []
    for size, accumulate in ((32, 1), (8, 4)):
        config = Config(**{**plain, **still, "encoder": str(folder), "batch_size": size, "accumulate": accumulate})
        made = train({"train": rows}, config, tmp_path / str(size))
        assert int(made.history()[-1]["step"]) == 5
        found.append(made.read_tensors("weights.safetensors"))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "roberta"])
def test_other_text_models_are_encoders_too(kind, bert, tmp_path):
    import transformers

    small = {"vocab_size": 60, "num_layers": 1, "num_heads": 2}
    config = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=60, n_embd=8, n_layer=1, n_head=2, n_positions=16),
        "t5": lambda: transformers.T5Config(d_model=8, d_kv=4, d_ff=8, **small),
        "roberta": lambda: transformers.RobertaConfig(
            vocab_size=60, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=18,
        ),
    }[kind]()  # fmt: skip
    shutil.copytree(bert, tmp_path, dirs_exist_ok=True)
    config.save_pretrained(tmp_path)
    rows = LabelData.from_lists([["x"]] * 3, texts=["word1 word2 noise3 " * 9, "word4 \ud800", ""])
    for pooling in ("mean", "first", "last"):
        made = open_encoder(Config(encoder=str(tmp_path), scratch=True, pooling=pooling)).eval()
        assert made.max_length <= (64 if kind == "t5" else 16)
        x = made.rows(rows)
        together = encode(made, x)
        alone = torch.cat([encode(made, x[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)  # padding has no effect
    made(x.inputs(np.arange(3))).sum().backward()
    assert all(p.grad is not None for p in made.parameters() if p.requires_grad)


def test_rates_fall_from_layer_to_layer(bert):
    from lastlayer.train.encode.network import EncodedNetwork

    config = Config(encoder=str(bert), lr=0.1, layer_decay=0.5, head_rate=4, weight_decay=0.3).settled(False)
    network = EncodedNetwork(open_encoder(config), 3)
    rate = {id(p): group["lr"] for group in network.parameter_groups(config) for p in group["params"]}
    names = {name: rate[id(p)] for name, p in network.named_parameters()}
    assert len(rate) == len(names)
    assert names["first.weight"] == names["bias"] == pytest.approx(0.4)
    assert names["encoder.model.encoder.layer.1.output.dense.bias"] == pytest.approx(0.1)
    assert names["encoder.model.encoder.layer.0.output.dense.weight"] == pytest.approx(0.05)
    assert names["encoder.model.embeddings.word_embeddings.weight"] == pytest.approx(0.025)
    stack = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert [[name for name, _ in block] for block in by_depth(stack)] == [
        ["0.weight", "0.bias"],
        ["2.weight", "2.bias"],
    ]


def test_frozen_features_are_computed_once(rows, bert, tmp_path, monkeypatch):
    counted = []
    real = frozen.computed
    monkeypatch.setattr(frozen, "computed", lambda e, d, c: counted.append(len(d)) or real(e, d, c))
    monkeypatch.setattr(frozen, "BLOCK", 50)
    config = Config(encoder=str(bert), freeze=True, bootstrap=0, cache=str(tmp_path / "cache"), accelerator="cpu")
    config = dataclasses.replace(config, loss="binary", C=1.0, refit="false")
    run = train({"all": rows}, config, tmp_path / "run")
    assert sum(counted) == len(set(rows.texts)) <= 160
    assert value(run, "ndcg@5") > 0.8
    counted.clear()
    train({"all": rows}, dataclasses.replace(config, loss="squared_hinge", seed=1), tmp_path / "other")
    assert not counted  # another split and another loss
    block = next((tmp_path / "cache").rglob("*.safetensors"))
    content = bytearray(block.read_bytes())
    content[-1] ^= 1
    block.write_bytes(content)
    train({"all": rows}, dataclasses.replace(config, seed=2), tmp_path / "third")
    assert 0 < sum(counted) <= 50  # the damaged block
    model = ll.load(run.path)
    expected = encode(open_encoder(config), open_encoder(config).rows(rows)).numpy()
    np.testing.assert_allclose(model.matrix(rows), model.features.transform(expected), atol=1e-5)
    assert description(model)["features"]["scaled"]["kind"] == "dense"  # what an export says about features
    shutil.copytree(bert, tmp_path / "moved")
    state = run.read_json("features.json")
    state["encoder"]["folder"] = str(tmp_path / "gone")
    run.write_json("features.json", state)
    with pytest.raises(ValueError, match=r"the run needs its encoder, the folder .*gone, which is not there"):
        ll.load(run.path).predict(rows.texts[:1])
    assert ll.load(run.path, encoder=tmp_path / "moved").predict(rows.texts[:1])


def test_an_encoder_that_changed_is_refused_and_nothing_is_lost(rows, bert, tmp_path, capsys):
    folder = shutil.copytree(bert, tmp_path / "bert")
    table = write_rows(tmp_path / "rows.tsv", rows)
    config = Config(encoder=str(folder), **QUICK)

    def stop(line):
        if line["epoch"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train({"all": rows}, config, tmp_path / "run", say=stop)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    shutil.rmtree(folder)
    save_bert(folder, rows.texts, width=8)
    for changed, message in (
        (8, "has an encoder of width 16, that of"),
        (16, "has another encoder: its `fingerprint`"),
    ):
        shutil.rmtree(folder)
        save_bert(folder, rows.texts, width=changed, seed=1)
        with pytest.raises(ValueError, match=message):
            train({"all": rows}, config, tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert table.exists()
    done = train({"all": rows}, dataclasses.replace(config, encoder=str(bert)), tmp_path / "done")
    with pytest.raises(ValueError, match=r"Train with --encoder .*done/encoder instead: it is the trained one"):
        opened(done.path, config)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(save_bert(tmp_path / "wide", rows.texts, width=32) / name, done / "encoder" / name)
    with pytest.raises(ValueError, match=r"was trained with an encoder of width 16, that of .*done/encoder is 32"):
        ll.load(done.path)


REFUSED = {
    "name without download": (lambda f: shutil.rmtree(f), "which is not there. If it is the name of a public model"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "only pytorch_model.bin, which"),
    "pickle in the index": (lambda f: index(f), "must name safetensors alone, got 'x.bin'"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "remote code": (lambda f: change(f, "config.json", auto_map={"AutoModel": "x.Y"}), "asks to run code of its own"),
    "remote tokenizer": (lambda f: change(f, "tokenizer_config.json", auto_map={}), "asks to run code of its own"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "holds no tokenizer that can be read"),
    "damaged tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "holds no tokenizer that can be read"),
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json"),
    "damaged config": (lambda f: (f / "config.json").write_text("{"), "must be JSON"),
    "damaged weights": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "cannot be opened as a model"),
    "unknown model": (lambda f: change(f, "config.json", model_type="nothing"), "cannot be opened as a model"),
    "other weights": (lambda f: change(f, "config.json", num_hidden_layers=3), "its weights lack"),
    "other vocabulary": (lambda f: shrink(f), "the model knows"),
}  # fmt: skip


def change(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def index(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.bin"}}))


def shrink(folder):
    save_bert(folder / "x", ["a"])
    shutil.copy(folder / "x/config.json", folder)
    shutil.copy(folder / "x/model.safetensors", folder)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_opened_is_one_line(name, bert, rows, tmp_path, capsys):
    spoil, message = REFUSED[name]
    folder = shutil.copytree(bert, tmp_path / "bert")
    spoil(folder)
    table = write_rows(tmp_path / "rows.tsv", rows.take(np.arange(30)))
    assert main(["train", str(table), "--encoder", str(folder), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("lastlayer: error: ")
    assert message in said
    assert not (tmp_path / "run").exists()


def test_the_network_is_asked_only_with_download(bert, rows, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(bert)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ConfigError, match="allow its download with --download"):
        open_encoder(Config(encoder="some/name"))
    assert not asked
    assert open_encoder(Config(encoder="some/name", download=True)).width == 16
    assert asked == [("some/name", ["*.json", "*.safetensors", "*.txt", "*.model"])]
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked[0][1])

    def fail(name, allow_patterns):
        raise OSError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match="cannot be downloaded: OSError: no network at all"):
        open_encoder(Config(encoder="some/name", download=True))


def test_a_missing_package_is_named_with_the_command_that_installs_it(bert, monkeypatch):
    import importlib

    real = importlib.import_module

    def gone(name, *rest):
        if name in ("transformers", "timm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(source.importlib, "import_module", gone)
    with pytest.raises(ConfigError, match=r'pip install "lastlayer\[text\]"'):
        open_encoder(Config(encoder=str(bert)))
    with pytest.raises(ConfigError, match=r'pip install "lastlayer\[images\]"'):
        open_encoder(Config(encoder="timm:resnet18", images="file", scratch=True))


def test_settings_of_encoders_are_checked():
    with pytest.raises(ConfigError, match="`freeze` needs an encoder"):
        Config(freeze=True)
    with pytest.raises(ConfigError, match="`k` must be auto or a number with an encoder"):
        Config(encoder="x", k="predicted")
    with pytest.raises(ConfigError, match="is an architecture without weights"):
        open_encoder(Config(encoder="timm:resnet18", images="file"))


class Mean(Encoder):
    """An encoder of one's own."""

    def __init__(self) -> None:
        super().__init__(width=5)
        self.layer = nn.Linear(4, 5)

    def forward(self, inputs):
        return self.layer(inputs).tanh()


def test_a_network_of_ones_own_is_an_encoder(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    data = LabelData.from_lists([[str(c) for c in range(4) if row[c] > 0] for row in x], features=x)
    run = train({"all": data}, Config(**{**QUICK, "epochs": 10, "lr": 0.05}), tmp_path / "run", encoder=Mean())
    assert value(run, "map") > 0.8
    with pytest.raises(ValueError, match="the encoder Mean, which was given in Python"):
        ll.load(run.path)
    first, second = (ll.load(run.path, encoder=Mean()).decision_function(x[:9]) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    frozen_run = train(
        {"all": data},
        Config(encoder="mine", freeze=True, loss="binary", bootstrap=0),
        tmp_path / "frozen",
        encoder=Mean(),
    )
    with pytest.raises(ValueError, match="which was given in Python"):
        ll.load(frozen_run.path).predict(x[:1])
    assert (frozen_run / "encoded").is_dir()


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return save_vit(tmp_path_factory.mktemp("models") / "vit")


def test_an_image_model_is_trained_and_predicts(vit, tmp_path, capsys):
    pytest.importorskip("PIL")
    table = save_images(tmp_path / "data")
    command = [
        "train",
        str(table),
        "--encoder",
        str(vit),
        "--images",
        "file",
        "--accelerator",
        "cpu",
        "--bootstrap",
        "0",
    ]
    command += ["--epochs", "6", "--lr", "0.004", "--batch-size", "16", "--precision", "bf16"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    assert value(RunFolder(tmp_path / "run"), "map") > 0.6
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), str(table), "-k", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 60
    files = [str(tmp_path / f"data/images/{i}.png") for i in range(3)]
    assert len(ll.load(tmp_path / "run").predict(files)) == 3
    assert main([*command, "--freeze", "--out", str(tmp_path / "frozen"), "--loss", "binary"]) == 0


def test_damaged_and_missing_images_are_named_by_row_or_left_out(vit, tmp_path, capsys):
    pytest.importorskip("PIL")
    table = save_images(tmp_path / "data", 40)
    whole = (tmp_path / "data/images/7.png").read_bytes()
    (tmp_path / "data/images/7.png").write_bytes(whole[: len(whole) // 2])
    command = ["train", str(table), "--encoder", str(vit), "--images", "file", "--epochs", "1", "--bootstrap", "0"]
    command += ["--accelerator", "cpu", "--out", str(tmp_path / "run")]
    assert main(command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "row 7: " in said
    assert "images/7.png is not an image that can be read" in said
    assert not (tmp_path / "run").exists()
    (tmp_path / "data/images/9.png").unlink()
    assert main([*command, "--on-error", "skip"]) == 0
    said = capsys.readouterr().err
    assert "skipped 2 wrong line(s)" in said
    assert "row 9: there is no image" in said
    assert main(["predict", str(tmp_path / "run"), str(table)]) == 2
    assert "row 7: " in capsys.readouterr().err
    assert main(["predict", str(tmp_path / "run"), str(table), "--on-error", "skip"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 38
    assert main([*command[:4], "--out", str(tmp_path / "texts")]) == 2
    assert "holds an image model. Name the column" in capsys.readouterr().err


def test_images_of_any_size_fill_the_format(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for wide, high in ((49, 59), (45, 37), (1, 1), (1, 60), (16, 16), (200, 3)):
        colours = np.broadcast_to(np.linspace(0, 200, wide).astype(np.uint8)[None, :, None], (high, wide, 3))
        image.fromarray(np.ascontiguousarray(colours)).save(tmp_path / "x.png")
        for format in (Format(16, 16), Format(7, 13), Format(8, 8, 0.875)):
            found = format.pixels(tmp_path / "x.png")
            assert found.shape == (3, format.height, format.width)
            assert abs(float(found.mean()) - colours.mean()) < 25  # the middle of the image


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_models_of_image_libraries(library, tmp_path, capsys):
    import_images(library)
    about = {"library": library, "architecture": "resnet18", "pretrained_cfg": {"input_size": [3, 16, 16]}}
    config = Config(encoder=str(tmp_path), images="file", scratch=True)
    (tmp_path / "config.json").write_text(json.dumps(about))
    first = open_encoder(config).eval()
    assert first.width == 512
    first.save(tmp_path)
    again = open_encoder(dataclasses.replace(config, scratch=False)).eval()
    x = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    torch.testing.assert_close(first(x), again(x))
    table = str(save_images(tmp_path / "data", 20))
    command = ["train", table, "--encoder", str(tmp_path), "--images", "file", "--epochs", "1", "--bootstrap", "0"]
    assert main([*command, "--accelerator", "cpu", "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), table, "-k", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 20
    assert main([*command, "--freeze", "--accelerator", "cpu", "--loss", "binary", "--out", str(tmp_path / "top")]) == 0
