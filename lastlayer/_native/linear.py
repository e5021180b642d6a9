"""The compiled solver of linear models; `train.linear.solver` checks the arguments and documents them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np

LOSSES = ("squared_hinge", "logistic")
LINKS = ("identity", "sigmoid", "hinge")
_ISA = ("baseline", "AVX2", "AVX-512")
_POINTERS = (
    *("indptr", "indices", "values", "row_weight", "row_start", "row_list", "label_start", "order"),
    *("positive_start", "positives", "costs", "positive_weight", "negative_weight"),
)


class Call(ctypes.Structure):
    """``struct call`` of `linear.c`."""

    _fields_ = (
        ("n_rows", ctypes.c_int64),
        ("n_features", ctypes.c_int64),
        ("indptr", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("row_weight", ctypes.c_void_p),
        ("n_problems", ctypes.c_int64),
        ("n_labels", ctypes.c_int64),
        ("n_costs", ctypes.c_int64),
        ("row_start", ctypes.c_void_p),
        ("row_list", ctypes.c_void_p),
        ("label_start", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("positive_start", ctypes.c_void_p),
        ("positives", ctypes.c_void_p),
        ("costs", ctypes.c_void_p),
        ("positive_weight", ctypes.c_void_p),
        ("negative_weight", ctypes.c_void_p),
        ("bias", ctypes.c_double),
        ("threshold", ctypes.c_double),
        ("tolerance", ctypes.c_double),
        ("max_passes", ctypes.c_int64),
        ("seed", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("loss", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("stop", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        ("intercepts", ctypes.c_void_p),
        ("passes", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
    )


class TreeArrays(ctypes.Structure):
    """``struct tree`` of `linear_predict.c`."""

    _fields_ = (
        ("n_nodes", ctypes.c_int64),
        ("n_features", ctypes.c_int64),
        ("n_labels", ctypes.c_int64),
        ("child_start", ctypes.c_void_p),
        ("child", ctypes.c_void_p),
        ("intercept", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("feature_start", ctypes.c_void_p),
        ("feature", ctypes.c_void_p),
        ("entry_start", ctypes.c_void_p),
        ("entry_child", ctypes.c_void_p),
        ("entry_value", ctypes.c_void_p),
    )


class PredictCall(ctypes.Structure):
    """``struct predict_call`` of `linear_predict.c`."""

    _fields_ = (
        ("trees", ctypes.c_void_p),
        ("n_trees", ctypes.c_int64),
        ("n_rows", ctypes.c_int64),
        ("indptr", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("beam", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("link", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("index", ctypes.c_void_p),
        ("score", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
    )


_WEIGHTS = np.dtype([("n", np.int64), ("index", np.uintp), ("value", np.uintp)], align=True)  # struct weights


def unavailable() -> str:
    """Why the compiled solver cannot run; empty if it can."""
    return _reason


def library() -> ctypes.CDLL:
    """Return the loaded library."""
    if _library is None:
        raise RuntimeError(f"lastlayer: the compiled solver cannot run here: {_reason}.")
    return _library


def instruction_set() -> str:
    """The instruction set the solver uses on this machine."""
    return _ISA[library().linear_isa()]


def solve(
    arrays: dict[str, np.ndarray | None],
    *,
    shape: tuple[int, int],
    loss: str,
    bias: float,
    threshold: float,
    tolerance: float,
    max_passes: int,
    seed: int,
    offset: int,
    threads: int,
    progress: Callable[[int], Any] | None = None,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Solve and return ``(indptr, indices, values, intercepts, passes)`` for each cost.

    The arrays are those of ``struct call``, contiguous and of its types. The work is done in a thread of its own, so
    that the caller's can answer an interrupt and report progress.
    """
    compiled = library()
    given: dict[str, Any] = arrays
    values = given["values"]
    double = int(values.dtype == np.float64)
    n_labels, n_costs = len(given["positive_start"]) - 1, len(given["costs"])
    call = Call(n_rows=shape[0], n_features=shape[1], n_labels=n_labels, n_costs=n_costs)
    call.n_problems, call.loss, call.threads = len(given["label_start"]) - 1, LOSSES.index(loss), threads
    call.bias, call.threshold, call.tolerance = bias, threshold, tolerance
    call.max_passes, call.seed, call.offset = max_passes, seed, offset
    for name in _POINTERS:
        array = arrays[name]
        setattr(call, name, None if array is None else array.ctypes.data)
    stop, done = ctypes.c_int(0), ctypes.c_int64(0)
    intercepts = np.zeros((n_costs, n_labels))
    passes = np.zeros((n_costs, n_labels), np.int32)
    weights = np.zeros((n_costs, n_labels), _WEIGHTS)
    call.stop, call.done = ctypes.addressof(stop), ctypes.addressof(done)
    call.intercepts, call.passes = intercepts.ctypes.data, passes.ctypes.data
    call.weights = weights.ctypes.data
    try:
        status = _watched(lambda: compiled.linear_solve(ctypes.byref(call), double), stop, done, progress)
        if status == 1:
            raise MemoryError("lastlayer: no memory for the rows and labels that are being worked on.")
        out = []
        for step in range(n_costs):
            first = weights[step].ctypes.data
            indptr = np.zeros(n_labels + 1, np.int64)
            np.cumsum(weights[step]["n"], out=indptr[1:])
            indices, value = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], values.dtype)
            to = (indices.ctypes.data, value.ctypes.data)
            for label, place in enumerate(indptr[:-1].tolist()):  # one at a time: the memory of both is never needed
                one = first + label * _WEIGHTS.itemsize
                compiled.linear_copy(one, 1, double, to[0] + place * 4, to[1] + place * values.itemsize)
                compiled.linear_free(one, 1)
            out.append((indptr, indices, value, intercepts[step], passes[step]))
        return out
    finally:
        compiled.linear_free(weights.ctypes.data, n_costs * n_labels)


def group_features(
    child_start: np.ndarray, indptr: np.ndarray, indices: np.ndarray, values: np.ndarray, n_features: int
) -> dict[str, np.ndarray]:
    """Order the weights of the children of each node by feature: the arrays of ``struct tree`` of that name."""
    n_nodes, seen = len(child_start) - 1, np.zeros(n_features, np.int32)
    start = np.zeros(n_nodes + 1, np.int64)
    rows = (child_start.ctypes.data, indptr.ctypes.data, indices.ctypes.data)
    library().linear_count_features(n_nodes, *rows, seen.ctypes.data, start.ctypes.data)
    out = {
        "feature_start": start,
        "feature": np.empty(start[-1], np.int32),
        "entry_start": np.zeros(start[-1] + 1, np.int64),
        "entry_child": np.empty(len(indices), np.int32),
        "entry_value": np.empty(len(indices), np.float32),
    }
    pointers = (array.ctypes.data for array in out.values())
    library().linear_fill_features(n_nodes, *rows, values.ctypes.data, seen.ctypes.data, *pointers)
    return out


def predict(
    trees: list[dict[str, Any]],
    rows: tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    link: str,
    beam: int,
    k: int | None,
    threads: int,
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the best `k` labels of each row and their scores; for `k` None, the scores of all children of the root."""
    structs = (TreeArrays * len(trees))()
    for struct, arrays in zip(structs, trees, strict=True):
        for name, value in arrays.items():
            setattr(struct, name, value.ctypes.data if isinstance(value, np.ndarray) else value)
    n_rows, stop = len(rows[0]) - 1, ctypes.c_int(0)
    width = k if k is not None else trees[0]["n_labels"]
    index = None if k is None else np.empty((n_rows, width), np.int32)
    score = np.empty((n_rows, width), np.float32)
    call = PredictCall(trees=ctypes.addressof(structs), n_trees=len(trees), n_rows=n_rows, beam=beam, k=width)
    call.indptr, call.indices, call.values = (array.ctypes.data for array in rows)
    call.link, call.threads, call.stop = LINKS.index(link), threads, ctypes.addressof(stop)
    call.index, call.score = None if index is None else index.ctypes.data, score.ctypes.data
    if _watched(lambda: library().linear_predict(ctypes.byref(call)), stop, ctypes.c_int64(0), None) == 1:
        raise MemoryError("lastlayer: no memory for the predictions.")
    return index, score


def _watched(
    work: Callable[[], int], stop: ctypes.c_int, done: ctypes.c_int64, progress: Callable[[int], Any] | None
) -> int:
    """Run the work in a thread; on an exception here, an interrupt for instance, end the thread and raise."""
    result: list[int] = []
    begun, ended, guard = threading.Event(), threading.Event(), threading.Lock()

    def run() -> None:
        with guard:
            if stop.value:
                return
            begun.set()
        try:
            result.append(work())
        finally:
            ended.set()

    try:
        threading.Thread(target=run, daemon=True).start()
        while not ended.wait(0.1):
            if progress is not None:
                progress(done.value)
        if progress is not None:
            progress(done.value)
    finally:
        with guard:  # from here on the thread does not begin
            stop.value = stop.value if ended.is_set() else 1
        while begun.is_set() and not ended.is_set():  # the memory it works on is freed after this, whatever happens
            try:
                ended.wait()
            except KeyboardInterrupt:
                continue
    return result[0]


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or why there is none."""
    # The plainest suffix first: one that names a version of Python is from before 0.2.
    files = [Path(__file__).with_name(f"_linear{suffix}") for suffix in reversed(EXTENSION_SUFFIXES)]
    path = next((file for file in files if file.exists()), None)
    if path is None:
        return None, "it was not built: the installation found no C compiler that could"
    try:
        library = ctypes.CDLL(str(path))
        if library.linear_call_size() != ctypes.sizeof(Call):
            return None, f"{path.name} is of another version; install the package again"
    except (OSError, AttributeError) as error:
        return None, f"{path.name} cannot be loaded ({error})"
    library.linear_solve.argtypes = (ctypes.POINTER(Call), ctypes.c_int)
    library.linear_copy.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    library.linear_free.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.linear_count_features.argtypes = (ctypes.c_int64, *5 * (ctypes.c_void_p,))
    library.linear_fill_features.argtypes = (ctypes.c_int64, *10 * (ctypes.c_void_p,))
    return library, ""


_library, _reason = _load()
