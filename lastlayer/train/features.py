"""From a row (text, sparse or dense features) to the input of the network, with a state that is plain JSON."""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from lastlayer.data import DataError, LabelData
from lastlayer.train.config import Config

# Scripts that put no space between words: Thai, Lao, Tibetan, Burmese, Khmer, kana, Chinese characters.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_NGRAMS = {"word": (1, 1), "char": (1, 3), "char_wb": (2, 5)}
_ROWS_LOOKED_AT = 1000


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

    encoder: Any = None  # the network below the labels that is trained with them, if there is one

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self._analyze: Any = None
        try:
            with np.errstate(over="ignore"):  # checked below
                self._arrays = {n: np.asarray(state[n], np.float32) for n in ("idf", "mean", "scale") if n in state}
            self.kind, self.n_features = str(state["kind"]), int(state["n_features"])
            if self.kind not in ("tfidf", "hashing", "sparse", "dense") or self.n_features < 1:
                raise ValueError("unknown kind")
            if self.kind == "tfidf" and not len(state["vocabulary"]) == len(state["idf"]) == self.n_features:
                raise ValueError("vocabulary and idf must have n_features entries")
            for name, values in self._arrays.items():
                if values.shape != (self.n_features,) or not np.isfinite(values).all():
                    raise ValueError(f"{name} must hold n_features finite numbers")
            if "scale" in self._arrays and not self._arrays["scale"].all():
                raise ValueError("scale must not be 0")
            if self.is_text:
                self._analyze = _analyzer(state)
                self._places = {word: i for i, word in enumerate(state.get("vocabulary", ()))}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"features.json: damaged: {error}.") from None

    @property
    def is_sparse(self) -> bool:
        """Whether the result is a CSR matrix."""
        return self.kind != "dense"

    @property
    def is_text(self) -> bool:
        """Whether the rows are texts."""
        return self.kind in ("tfidf", "hashing")

    @classmethod
    def fit(cls, data: LabelData, config: Config) -> FeatureMap:
        """Learn vocabulary, weights or scales from training rows."""
        if data.texts is not None:
            weights = data.weights if data.weights is not None and data.weights.any() else np.ones(len(data))
            return cls._fit_texts([text for text, weight in zip(data.texts, weights, strict=True) if weight], config)
        x = data.features
        if x is None:
            raise DataError("the rows have neither texts nor features.")
        _check_finite(x)
        scale = config.scale
        if isinstance(x, np.ndarray):
            if scale in ("auto", "standard"):
                mean, std = _moments(x, data.weights)
                std = np.where(std > 0, std, 1)
                return cls({"kind": "dense", "n_features": x.shape[1], "mean": mean.tolist(), "scale": std.tolist()})
            return cls({"kind": "dense", "n_features": x.shape[1], "l2": scale == "l2"})
        if scale == "standard":
            raise DataError("`scale` must be auto, none or l2 for sparse features, got 'standard'.")
        return cls({"kind": "sparse", "n_features": x.shape[1], "l2": scale != "none"})

    @classmethod
    def _fit_texts(cls, texts: list[str], config: Config) -> FeatureMap:
        analyzer = choose_analyzer(texts) if config.analyzer == "auto" else config.analyzer
        ngrams = _NGRAMS[analyzer]
        if config.ngrams != "auto":
            low, _, high = config.ngrams.rpartition("-")
            ngrams = (int(low or 1), int(high))
        state: dict[str, Any] = {
            "n_features": config.n_features,
            "analyzer": analyzer,
            "ngrams": list(ngrams),
            "marks": True,
        }
        if config.vectorizer == "hashing":
            return cls({"kind": "hashing", **state})
        least = min(config.min_rows, max(len(texts) // 2, 1))
        counter = _vectorizer({"kind": "tfidf", **state}, max_features=config.n_features, min_df=least)
        try:
            counts = counter.fit_transform(texts)
        except ValueError:
            what = "word" if analyzer == "word" else "sequence of characters"
            if least > 1:
                raise DataError(f"no {what} of the texts occurs in {least} rows or more. Lower `min_rows`.") from None
            raise DataError(f"the texts hold no {what} of two characters or more.") from None
        words = [str(w) for w in counter.get_feature_names_out()]
        seen = np.bincount(counts.indices, minlength=len(words))
        idf = np.log((1 + len(texts)) / (1 + seen)) + 1
        return cls({"kind": "tfidf", **state, "n_features": len(words), "vocabulary": words, "idf": idf.tolist()})

    def __call__(self, data: LabelData) -> Any:
        """Map rows; returns float32, CSR or dense."""
        if self.is_text:
            if data.texts is None:
                raise DataError("the run was trained on texts, the rows have none.")
            return self._words(data.texts)
        if data.features is None:
            raise DataError("the run was trained on features, the rows are texts.")
        return self.transform(data.features)

    def transform(self, x: Any) -> Any:
        """Scale given features."""
        _check_finite(x)
        dense = isinstance(x, np.ndarray)
        if x.shape[1] != self.n_features:
            if self.kind == "dense" or dense or (x.shape[1] > self.n_features and x[:, self.n_features :].nnz):
                raise DataError(f"the run was trained on {self.n_features} features, the rows have {x.shape[1]}.")
            x = x.copy()
            x.resize((x.shape[0], self.n_features))
        if self.kind == "dense":
            x = x if dense else x.toarray()
            if "mean" in self._arrays:
                return self._standardized(x)
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        _check_finite(x)  # float64 reaches further
        return _unit_rows(x) if self.state.get("l2") else x

    def _standardized(self, x: np.ndarray, size: int = 1 << 14) -> np.ndarray:
        """Subtract means and divide by deviations, in float64: large numbers close together, such as times, need it."""
        mean, scale = (np.asarray(self.state[name], np.float64) for name in ("mean", "scale"))
        out = np.empty(x.shape, np.float32)
        for at in range(0, len(x), size):
            out[at : at + size] = (x[at : at + size].astype(np.float64) - mean) / scale
        return out

    def to(self, device: Any) -> None:
        """Move to a device; nothing here computes on one."""

    def described(self) -> dict[str, Any]:
        """Return the state with all that another program needs: the range of n-grams and the pattern of words."""
        if not self.is_text:
            return self.state
        analyzer, low, high = _settings(self.state)
        words = {"token_pattern": _pattern(self.state)} if analyzer == "word" else {}
        return {**self.state, "analyzer": analyzer, "ngrams": [low, high], **words}

    def unknown_rows(self, x: Any) -> int:
        """Return how many of the mapped texts have no word that the map knows."""
        return int((np.diff(x.indptr) == 0).sum()) if self.is_text else 0

    def note(self, unknown: int, rows: int, which: str = "rows") -> str | None:
        """Return a sentence about rows without a known word, if they are more than 1 % of the rows."""
        if unknown <= 0.01 * rows:
            return None
        is_word = self.state.get("analyzer", "word") == "word"
        what = "word" if is_word else "sequence of characters"
        hint = " If words are not separated by spaces, use --analyzer char." if is_word else ""
        return f"{unknown} of {rows} {which} have no known {what}: label frequencies alone decide there.{hint}"

    def _words(self, texts: list[str]) -> Any:
        if self.kind == "hashing":
            return _vectorizer(self.state).transform(texts).astype(np.float32)
        x = self._counts(texts)
        x.data = (1 + np.log(x.data)) * self._arrays["idf"][x.indices]
        return _unit_rows(x)

    def _counts(self, texts: list[str]) -> Any:
        """Count the known words of each text, as scikit-learn does, without its second of import time."""
        import scipy.sparse as sp

        index, count, ends = array("i"), array("i"), array("q", [0])
        for text in texts:
            counts: dict[int, int] = {}
            for word in self._analyze(text):
                if (place := self._places.get(word)) is not None:
                    counts[place] = counts.get(place, 0) + 1
            places = sorted(counts)
            index.extend(places)
            count.extend([counts[i] for i in places])
            ends.append(len(index))
        data = np.array(count, dtype=np.float32)
        parts = (data, np.array(index, dtype=np.int32), np.array(ends, dtype=np.int64))
        return sp.csr_matrix(parts, shape=(len(texts), self.n_features))


def _moments(x: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each feature; rows count by their weights, and not at all with 0."""
    if weight is not None and weight.any() and not weight.all():
        x, weight = x[weight > 0], weight[weight > 0]
    if weight is None or np.ptp(weight) == 0:
        mean, std = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64)
    else:
        share = weight / weight.sum()
        mean = share @ x
        std = np.sqrt(share @ np.square(x - mean))
    return mean, np.where(np.ptp(x, axis=0) == 0, 0, std)  # that of a constant may be rounded to 1e-17


def _check_finite(x: Any) -> None:
    """Refuse features that are not finite numbers."""
    values = x if isinstance(x, np.ndarray) else x.data
    if np.isfinite(values).all():
        return
    bad = int(np.flatnonzero(~np.isfinite(values.ravel()))[0])
    row = bad // x.shape[1] if isinstance(x, np.ndarray) else int(np.searchsorted(x.indptr, bad, side="right")) - 1
    raise DataError(
        f"features must be finite, got {values.ravel()[bad]} in row {row}. Replace it, or leave the row out."
    )


def _unit_rows(x: Any) -> Any:
    """Scale the rows of a CSR matrix or an array to unit length; rows of zeros stay."""
    if isinstance(x, np.ndarray):
        norm = np.sqrt((x.astype(np.float64) ** 2).sum(1, keepdims=True))
        return (x / np.where(norm > 0, norm, 1)).astype(np.float32)
    rows = np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))
    norm = np.sqrt(np.bincount(rows, x.data.astype(np.float64) ** 2, minlength=x.shape[0]))
    x.data = (x.data / np.where(norm > 0, norm, 1)[rows]).astype(np.float32)
    return x


def choose_analyzer(texts: Sequence[str]) -> str:
    """Return ``"char"`` for texts whose words are not told apart by spaces, else ``"word"``.

    That is a script without spaces for a fifth of the letters, or words of more than 20 letters on average.

    Example:
        >>> choose_analyzer(["a red apple"]), choose_analyzer(["赤いりんごを食べる"])
        ('word', 'char')
    """
    step = max(len(texts) // _ROWS_LOOKED_AT, 1)
    sample = " ".join(text[:500] for text in texts[::step])
    words = re.findall(r"\w+", sample)
    letters = sum(map(len, words))
    if not letters:
        return "word"
    unspaced = len(_UNSPACED.findall(sample))
    return "char" if unspaced > 0.2 * letters or letters > 20 * len(words) else "word"


@lru_cache(maxsize=1)
def _word_pattern() -> str:
    """Return a pattern for words of two letters or more that keeps the marks of a letter with it.

    scikit-learn's own pattern breaks a word at every vowel sign of Hindi or Tamil, and at accents that are characters
    of their own.
    """
    codes = [*range(0x300, 0x20000), *range(0xE0100, 0xE01F0)]  # the planes that hold marks
    marks = [c for c in codes if unicodedata.category(chr(c))[0] == "M"]
    return rf"(?u)\w[\w{''.join(_runs(marks))}]+"


def _runs(codes: list[int]) -> list[str]:
    """Return a sorted list of code points as ranges of a character class."""
    out: list[str] = []
    first = last = codes[0]
    for code in [*codes[1:], -1]:
        if code != last + 1:
            out.append(chr(first) if first == last else f"{chr(first)}-{chr(last)}")
            first = code
        last = code
    return out


def _settings(state: dict[str, Any]) -> tuple[str, int, int]:
    """Return the analyzer and the range of n-grams; runs of version 0.1 keep the words that they were trained on."""
    given, analyzer = state["ngrams"], str(state.get("analyzer", "word"))
    low, high = (1, int(given)) if isinstance(given, int) else (int(given[0]), int(given[1]))
    if analyzer not in _NGRAMS or not 1 <= low <= high <= 20:
        raise ValueError("unknown analyzer or ngrams")
    return analyzer, low, high


def _vectorizer(state: dict[str, Any], **options: Any) -> Any:
    """Return scikit-learn's counter or hasher of a state."""
    from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer

    analyzer, low, high = _settings(state)
    options.update(analyzer=analyzer, ngram_range=(low, high))
    if state.get("marks") and analyzer == "word":
        options["token_pattern"] = _word_pattern()
    if state["kind"] == "hashing":
        return HashingVectorizer(n_features=int(state["n_features"]), alternate_sign=False, norm="l2", **options)
    return CountVectorizer(dtype=np.float32, **options)


def _pattern(state: dict[str, Any]) -> str:
    """Return the regular expression of words; that of scikit-learn for runs of version 0.1."""
    return _word_pattern() if state.get("marks") else r"(?u)\b\w\w+\b"


def _analyzer(state: dict[str, Any]) -> Callable[[str], list[str]]:
    """Return the function from a text to its words or sequences, which is that of scikit-learn's vectorisers."""
    analyzer, low, high = _settings(state)
    find = re.compile(_pattern(state)).findall

    def words(text: str) -> list[str]:
        tokens: list[str] = find(text.lower())
        if high == 1:
            return tokens
        spans = ((i, i + n) for n in range(low, min(high, len(tokens)) + 1) for i in range(len(tokens) - n + 1))
        return [" ".join(tokens[a:b]) for a, b in spans]

    def characters(text: str) -> list[str]:
        text = re.sub(r"\s\s+", " ", text.lower())
        return [text[i : i + n] for n in range(low, min(high, len(text)) + 1) for i in range(len(text) - n + 1)]

    def within_words(text: str) -> list[str]:
        out = []
        for word in text.lower().split():
            padded = f" {word} "
            for n in range(low, high + 1):
                out += [padded[i : i + n] for i in range(max(len(padded) - n, 0) + 1)]
                if n >= len(padded):  # a short word counts once
                    break
        return out

    return {"word": words, "char": characters, "char_wb": within_words}[analyzer]
