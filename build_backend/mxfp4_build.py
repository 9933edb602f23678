"""PEP 517 backend of mxfp4-ops: setuptools, with build requirements that depend on the machine.

torch is never a build requirement: an isolated build would download gigabytes of it. Only its headers are used, and
they are looked up in the environment that the package is being built for (see setup.py). cmake and ninja are required
only where they are not on PATH. pybind11 (headers only, 300 KB) always is: a backend cannot see which extras were asked
for, and the test module `mxfp4_ops._kernels` has to be there after `pip install .[test]`.
"""

import os
import shutil

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the other hooks of PEP 517 and 660)


def _machine_requirements() -> list[str]:
    if os.environ.get("MXFP4_BUILD", "auto") == "none":
        return []
    tools = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    return [*tools, "pybind11>=2.13"]


def get_requires_for_build_wheel(config_settings=None):
    """Name what a wheel needs on this machine."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _machine_requirements()


def get_requires_for_build_editable(config_settings=None):
    """Name what an editable install needs on this machine."""
    return build_meta.get_requires_for_build_editable(config_settings) + _machine_requirements()
