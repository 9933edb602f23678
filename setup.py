"""Build the compiled libraries of mxfp4_ops with CMake and ninja; metadata is in pyproject.toml.

MXFP4_BUILD = auto | cpu | cuda | hip | none (default auto: cpu). `none` makes the pure Python package.

Two modules are built. `_C_cpu.so` holds the ops; it contains no Python symbol and only the stable ABI of torch, so the
wheel is py3-none-<platform>. `_kernels` is a pybind11 module for the tests and is tied to the Python that built it; it
is built whenever the headers of Python are found, and does no harm to other Pythons: only tests import it.
"""

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TARGETS = ("auto", "cpu", "cuda", "hip", "none")


def build_target() -> str:
    """Return "cpu" or "none" from MXFP4_BUILD, or refuse."""
    target = os.environ.get("MXFP4_BUILD", "auto")
    if target not in TARGETS:
        raise SystemExit(f"MXFP4_BUILD={target} is unknown; use one of {', '.join(TARGETS)}.")
    if target in ("cuda", "hip"):
        raise SystemExit(f"MXFP4_BUILD={target}: there are no {target.upper()} sources yet; use MXFP4_BUILD=cpu.")
    if target == "none":
        return target
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        raise SystemExit("No C++ compiler was found; install one, or set MXFP4_BUILD=none for the pure Python package.")
    return "cpu"


def torch_include() -> Path:
    """Find the headers of the torch installed in the target environment, without importing it.

    Inside pip's build isolation sys.path lacks the target's site-packages, but sysconfig still knows them.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None:
        places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        spec = importlib.machinery.PathFinder.find_spec("torch", places)
    if spec is None or spec.origin is None:
        raise SystemExit("Building mxfp4_ops needs an installed torch >= 2.11 (MXFP4_BUILD=none needs none).")
    return Path(spec.origin).parent / "include"


def cmake_options() -> list[str]:
    """Return the -D options: torch, and what the test module needs where it is there."""
    options = {"CMAKE_BUILD_TYPE": "Release", "TORCH_INCLUDE": torch_include()}
    python_include = sysconfig.get_path("include")
    if importlib.util.find_spec("pybind11") is not None and (Path(python_include) / "Python.h").exists():
        import pybind11

        options["PYBIND11_INCLUDE"] = pybind11.get_include()
        options["PYTHON_INCLUDE"] = python_include
        options["PYTHON_EXT_SUFFIX"] = sysconfig.get_config_var("EXT_SUFFIX")
    else:
        print("mxfp4_ops._kernels, which the tests need, is not built: no Python.h or no pybind11", file=sys.stderr)
    return [f"-D{name}={value}" for name, value in options.items()]


class CMakeBuild(build_ext):
    """Build all libraries in one CMake run."""

    def run(self) -> None:
        package = ROOT / "python" / "mxfp4_ops" if self.editable_mode else Path(self.build_lib).resolve() / "mxfp4_ops"
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = ["cmake", str(ROOT), "-GNinja", f"-DCMAKE_INSTALL_PREFIX={package}", *cmake_options()]
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run(configure, cwd=build, check=True)
        subprocess.run(["cmake", "--build", ".", "--target", "install", "-j", jobs], cwd=build, check=True)

    def get_outputs(self) -> list[str]:
        """Return nothing: CMake installs the files, and wheels take all of build_lib."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformWheel(bdist_wheel):
    """Tag the wheel py3-none-<platform>: the ops are bound to a platform but to no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


if build_target() == "none":
    setup()
else:
    setup(
        ext_modules=[Extension("mxfp4_ops._C_cpu", [])],
        cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
    )
