"""The C kernel of the codec, and the example in the wheel; everything else about the package is in pyproject.toml.

The kernel is optional: where there is no working C compiler `pip install` warns, leaves it out, and
weightwire falls back to its NumPy implementation, which produces the same bytes more slowly.
"""

import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

CODEC = Path("src/weightwire/codec")

# One wheel for every CPython from 3.11 on. Free-threaded builds have no limited API: they get a wheel of
# their own.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildKernel(build_ext):
    """Asks for C11 in the words of the compiler at hand."""

    def build_extensions(self) -> None:
        msvc = self.compiler.compiler_type == "msvc"
        for extension in self.extensions:
            extension.extra_compile_args = ["/std:c11", "/O2"] if msvc else ["-std=c11", "-O3"]
        super().build_extensions()


class BuildWithExample(build_py):
    """`weightwire demo` finds the example in the wheel; in an editable install, where it lies."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "weightwire", "examples", "wordle")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("examples/wordle", target, ignore=shutil.ignore_patterns("__pycache__"))


kernel = Extension(
    "weightwire.codec._kernel",
    sources=[(CODEC / "_kernel.c").as_posix()],
    # _kernel.c includes its neighbours: a change in any of them rebuilds it.
    depends=sorted(path.as_posix() for path in CODEC.rglob("*.[ch]")),
    define_macros=[("Py_LIMITED_API", "0x030b0000")] if LIMITED_API else [],
    py_limited_api=LIMITED_API,
    optional=True,
)

setup(
    ext_modules=[kernel],
    cmdclass={"build_ext": BuildKernel, "build_py": BuildWithExample},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
