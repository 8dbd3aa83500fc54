"""The C kernel of the codec, and the example in the wheel; everything else about the package is in pyproject.toml.

The kernel is optional: without a working C compiler `pip install` warns and leaves it out, and weightwire falls back
to its NumPy implementation, which produces the same bytes more slowly. Such a wheel is tagged `py3-none-any`.
"""

import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

CODEC = Path("src/weightwire/codec")

# One wheel for every CPython from 3.11 on. Free-threaded builds have no limited API: they get a wheel of their own.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


class CleanBuild(build):
    """Builds from nothing: setuptools packs all that lies in build/, a kernel of an earlier build too."""

    def run(self) -> None:
        for left_over in (self.build_lib, self.build_temp):
            shutil.rmtree(left_over, ignore_errors=True)
        super().run()


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
            shutil.copytree("examples/wordle", target, ignore=shutil.ignore_patterns("__pycache__"))


class TaggedWheel(bdist_wheel):
    """Tags a wheel by what is in it. setuptools decides before it builds, and takes an optional kernel for built."""

    def run(self) -> None:
        self.run_command("build")
        self.skip_build = True
        if not any(Path(file).exists() for file in self.get_finalized_command("build_ext").get_outputs()):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


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
    cmdclass={
        "bdist_wheel": TaggedWheel,
        "build": CleanBuild,
        "build_ext": BuildKernel,
        "build_py": BuildWithExample,
    },
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
