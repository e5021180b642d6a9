"""From a row (text, sparse or dense features) to the input of the network, with a state that is plain JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from lastlayer.data import DataError, LabelData
from lastlayer.train.config import Config


class FeatureMap:
    """A fitted map from rows to a CSR matrix or a dense array.

    Kinds: ``tfidf`` and ``hashing`` take texts (scikit-learn's vectorisers), ``sparse`` and ``dense`` take features.

    Args:
        state: A dictionary of plain values, as :meth:`fit` makes it and ``features.json`` holds it.

    Example:
        >>> from lastlayer.data import LabelData
        >>> from lastlayer.train import Config, FeatureMap
        >>> rows = LabelData.from_lists([["a"], ["b"]], texts=["red apple", "red sky"])
        >>> features = FeatureMap.fit(rows, Config(min_rows=1))
        >>> features.state["vocabulary"], features(rows).shape
        (['apple', 'red', 'sky'], (2, 3))
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self._counter: Any = None
        try:
            self._arrays = {n: np.asarray(state[n], np.float32) for n in ("idf", "mean", "scale") if n in state}
            self.kind, self.n_features = str(state["kind"]), int(state["n_features"])
            if self.kind not in ("tfidf", "hashing", "sparse", "dense") or self.n_features < 1:
                raise ValueError("unknown kind")
            if self.kind == "tfidf" and not len(state["vocabulary"]) == len(state["idf"]) == self.n_features:
                raise ValueError("vocabulary and idf must have n_features entries")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"features.json: damaged: {error}.") from None

    @property
    def is_sparse(self) -> bool:
        """Whether the result is a CSR matrix."""
        return self.kind != "dense"

    @classmethod
    def fit(cls, data: LabelData, config: Config) -> FeatureMap:
        """Learn vocabulary, weights or scales from training rows."""
        if data.texts is not None:
            if config.vectorizer == "hashing":
                return cls({"kind": "hashing", "n_features": config.n_features, "ngrams": config.ngrams})
            return cls._fit_words(data.texts, config)
        x = data.features
        if x is None:
            raise DataError("the rows have neither texts nor features.")
        scale = config.scale
        if isinstance(x, np.ndarray):
            if scale in ("auto", "standard"):
                mean, std = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64)
                std = np.where(std > 0, std, 1)
                return cls({"kind": "dense", "n_features": x.shape[1], "mean": mean.tolist(), "scale": std.tolist()})
            return cls({"kind": "dense", "n_features": x.shape[1], "l2": scale == "l2"})
        if scale == "standard":
            raise DataError("`scale` must be auto, none or l2 for sparse features, got 'standard'.")
        return cls({"kind": "sparse", "n_features": x.shape[1], "l2": scale != "none"})

    @classmethod
    def _fit_words(cls, texts: list[str], config: Config) -> FeatureMap:
        from sklearn.feature_extraction.text import TfidfVectorizer

        low = min(config.min_rows, max(len(texts) // 2, 1))
        vectorizer = TfidfVectorizer(
            max_features=config.n_features, ngram_range=(1, config.ngrams), min_df=low, sublinear_tf=True
        )
        try:
            vectorizer.fit(texts)
        except ValueError:
            raise DataError(f"no word of the texts occurs in {low} rows or more. Lower `min_rows`.") from None
        words = [str(w) for w in vectorizer.get_feature_names_out()]
        idf = [float(v) for v in vectorizer.idf_]
        return cls(
            {"kind": "tfidf", "n_features": len(words), "ngrams": config.ngrams, "vocabulary": words, "idf": idf}
        )

    def __call__(self, data: LabelData) -> Any:
        """Map rows; returns float32, CSR or dense."""
        if self.kind in ("tfidf", "hashing"):
            if data.texts is None:
                raise DataError("the run was trained on texts, the rows have none.")
            return self._words(data.texts)
        if data.features is None:
            raise DataError("the run was trained on features, the rows are texts.")
        return self.transform(data.features)

    def transform(self, x: Any) -> Any:
        """Scale given features."""
        if x.shape[1] != self.n_features:
            if self.kind == "dense" or (x.shape[1] > self.n_features and x[:, self.n_features :].nnz):
                raise DataError(f"the run was trained on {self.n_features} features, the rows have {x.shape[1]}.")
            x = x.copy()
            x.resize((x.shape[0], self.n_features))
        if self.kind == "dense":
            x = np.asarray(x, np.float32)
            if "mean" in self._arrays:
                return (x - self._arrays["mean"]) / self._arrays["scale"]
        if not self.state.get("l2"):
            return x.astype(np.float32)
        from sklearn.preprocessing import normalize

        return normalize(x.astype(np.float32))

    def _words(self, texts: list[str]) -> Any:
        from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer
        from sklearn.preprocessing import normalize

        ngrams = (1, int(self.state["ngrams"]))
        if self.kind == "hashing":
            hashing = HashingVectorizer(n_features=self.n_features, ngram_range=ngrams, alternate_sign=False, norm="l2")
            return hashing.transform(texts).astype(np.float32)
        if self._counter is None:
            self._counter = CountVectorizer(vocabulary=self.state["vocabulary"], ngram_range=ngrams)
        x = self._counter.transform(texts).astype(np.float32)
        x.data = 1 + np.log(x.data)
        return normalize(x.multiply(self._arrays["idf"]).tocsr().astype(np.float32))
