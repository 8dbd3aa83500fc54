"""Builds the C kernel, adds the example to the wheel, and makes README's links absolute. The rest is in pyproject.toml.

The kernel is optional. Without a working C compiler `pip install` warns and leaves it out, and weightwire falls back
to its NumPy implementation, which produces the same bytes more slowly. Such a wheel is tagged `py3-none-any`.
"""

import re
import shutil
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

CODEC = Path("src/weightwire/codec")

# One wheel for every CPython from 3.11 on. Free-threaded builds lack the limited API and get a separate wheel.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


class CleanBuild(build):
    """Builds from scratch: setuptools packs everything in build/, including the kernel of an earlier build."""

    def run(self) -> None:
        for left_over in (self.build_lib, self.build_temp):
            shutil.rmtree(left_over, ignore_errors=True)
        super().run()


class BuildKernel(build_ext):
    """Requests C11 with the flags of the compiler in use."""

    def build_extensions(self) -> None:
        msvc = self.compiler.compiler_type == "msvc"
        for extension in self.extensions:
            extension.extra_compile_args = ["/std:c11", "/O2"] if msvc else ["-std=c11", "-O3"]
        super().build_extensions()


class BuildWithExample(build_py):
    """Copies the example into the wheel for `weightwire demo`. An editable install uses it in place."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "weightwire", "examples", "wordle")
            shutil.copytree("examples/wordle", target, ignore=shutil.ignore_patterns("__pycache__"))


class TaggedWheel(bdist_wheel):
    """Tags a wheel by its content. setuptools tags it before building, as if an optional kernel always built."""

    def run(self) -> None:
        self.run_command("build")
        self.skip_build = True
        if not any(Path(file).exists() for file in self.get_finalized_command("build_ext").get_outputs()):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


def index_page() -> str:
    """README for a package index, where relative links and images would not resolve."""
    home = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
    text = Path("README.md").read_text(encoding="utf-8").replace("](#", "](README.md#")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{home}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:)", rf"\1{home}/blob/main/", text)


kernel = Extension(
    "weightwire.codec._kernel",
    sources=[(CODEC / "_kernel.c").as_posix()],
    # _kernel.c includes the other files: a change to any of them rebuilds it.
    depends=sorted(path.as_posix() for path in CODEC.rglob("*.[ch]")),
    define_macros=[("Py_LIMITED_API", "0x030b0000")] if LIMITED_API else [],
    py_limited_api=LIMITED_API,
    optional=True,
)

setup(
    long_description=index_page(),
    long_description_content_type="text/markdown",
    ext_modules=[kernel],
    cmdclass={
        "bdist_wheel": TaggedWheel,
        "build": CleanBuild,
        "build_ext": BuildKernel,
        "build_py": BuildWithExample,
    },
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
