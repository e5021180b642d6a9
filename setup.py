"""Build the compiled CPU kernels; the rest of the package's description is in pyproject.toml.

The libraries hold no Python module: they are loaded with ctypes (see lastlayer/_native), so that one wheel serves every
version of Python. They are optional: without a working compiler the package is installed all the same and runs on plain
torch.
"""

from __future__ import annotations

import os

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """Build a shared library that exports no module."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Name nothing but what the source marks for export."""
        return ext.export_symbols

    def get_ext_filename(self, fullname: str) -> str:
        """Leave the version of Python out of the name."""
        return os.path.join(*fullname.split(".")) + (".pyd" if os.name == "nt" else ".so")


class Wheel(bdist_wheel):
    """A wheel for one platform and every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, its binary interface and the platform."""
        return "py3", "none", super().get_tag()[2]


FOLDER = "lastlayer/_native"
# No option that lets the compiler forget nan, inf or the order of operations. Threaded jumps split the branchless loops
# up again.
OPTIONS = [
    "-std=gnu11",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-thread-jumps",
    "-fopenmp-simd",
    "-fvisibility=hidden",
    "-pthread",
]


def library(name: str, *headers: str, more: tuple[str, ...] = ()) -> Extension:
    """Return the library of a C file, the headers that it includes, and more C files."""
    return Extension(
        f"lastlayer._native._{name}",
        sources=[f"{FOLDER}/{file}.c" for file in (name, *more)],
        depends=[f"{FOLDER}/{header}.h" for header in (*headers, "pool", "sets")],
        extra_compile_args=OPTIONS,
        extra_link_args=["-pthread"],
        libraries=["m"],
        optional=True,
    )


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
    ext_modules=[
        library(
            "lml",
            "lml_math",
            "lml_rows",
            "lml_tile",
            "lml_types",
            "weighted",
            "weighted_rows",
            "weighted_after",
            "weighted_band",
            "grouped",
            "fused_rows",
            "targets",
            more=("fused",),
        ),
        library("linear", "linear_block", "linear_types", more=("linear_predict",)),
    ],
)
