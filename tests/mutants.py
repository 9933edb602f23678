"""Break the package in one place at a time and see that the tests notice: every mutant has to be killed.

    python tests/mutants.py                     all of them; status 1 if one survives or its text is not found once
    python tests/mutants.py --only NAME ...     some of them
    python tests/mutants.py --jobs 2            C++ and Python mutants side by side (the default)

The tree is copied to a temporary folder and built there; a mutant of C++ compiles what it changes. The tests that any
mutant names have to pass without one first. The table is in mutants_table.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants_table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 600  # seconds that one run of tests may take: a mutant that hangs is dead


class Tree:
    """A copy of the project with libraries of its own."""

    def __init__(self, folder: Path) -> None:
        self.root, self.build = folder / "tree", folder / "build"
        for name in ("python", "csrc", "tests", "docs", "CMakeLists.txt", "setup.py", "pyproject.toml"):
            source, target = ROOT / name, self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(source, target)

    def configure(self) -> None:
        """As setup.py does, for this Python and this torch."""
        import pybind11
        import torch

        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_INSTALL_PREFIX": self.root / "python" / "mxfp4_ops",
            "TORCH_INCLUDE": Path(torch.__file__).parent / "include",
            "PYBIND11_INCLUDE": pybind11.get_include(),
            "PYTHON_INCLUDE": sysconfig.get_path("include"),
            "PYTHON_EXT_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        }
        flags = [f"-D{name}={value}" for name, value in options.items()]
        subprocess.run(
            ["cmake", str(self.root), "-GNinja", "-B", str(self.build), *flags], check=True, capture_output=True
        )

    def compile(self) -> str:
        """Build and install; return what the compiler says if it fails."""
        command = ["cmake", "--build", str(self.build), "--target", "install", "-j", str(os.cpu_count() or 1)]
        done = subprocess.run(command, capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stdout[-2000:]

    def take_libraries(self, other: Tree) -> None:
        for library in (other.root / "python" / "mxfp4_ops").glob("*.so"):
            shutil.copy(library, self.root / "python" / "mxfp4_ops")

    def test(self, names: Sequence[str]) -> tuple[bool, str]:
        """Whether the tests pass, and the last lines of what pytest says."""
        environment = {**os.environ, "PYTHONPATH": str(self.root / "python"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *names]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return False, "no end"
        if done.returncode in (4, 5):  # pytest found no such test
            raise SystemExit(f"{names}: {done.stdout[-500:]}{done.stderr[-500:]}")
        return done.returncode == 0, done.stdout[-1500:]


def one(tree: Tree, mutant: Mutant) -> tuple[Mutant, str, float]:
    """Apply a mutant, test, take it back. Returns "killed", "SURVIVED" or what went wrong."""
    start, path = time.monotonic(), tree.root / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return mutant, f"TEXT FOUND {text.count(mutant.old)} TIMES", 0.0
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        error = tree.compile() if mutant.compiled else ""
        state = f"DOES NOT COMPILE {error}" if error else "SURVIVED" if tree.test(mutant.tests)[0] else "killed"
    finally:
        path.write_text(text)
    return mutant, state, time.monotonic() - start


def several(tree: Tree, mutants: Sequence[Mutant]) -> list[tuple[Mutant, str, float]]:
    results = []
    for mutant in mutants:
        results.append(one(tree, mutant))
        print(f"{results[-1][1]:10} {results[-1][2]:6.1f} s  {mutant.name:32} {mutant.breaks}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    unknown = set(options.only) - {m.name for m in MUTANTS}
    if unknown:
        raise SystemExit(f"--only must be of {', '.join(m.name for m in MUTANTS)}, got {', '.join(unknown)}.")
    chosen = [m for m in MUTANTS if not options.only or m.name in options.only]
    with tempfile.TemporaryDirectory() as folder:
        trees = [Tree(Path(folder) / str(i)) for i in range(max(options.jobs, 1))]
        trees[0].configure()
        error = trees[0].compile()
        if error:
            raise SystemExit(error)
        for tree in trees[1:]:
            tree.take_libraries(trees[0])
        passed, said = trees[-1].test(sorted({t for m in chosen for t in m.tests}))
        if not passed:
            raise SystemExit(f"the tests fail without a mutant:\n{said}")
        print(f"{len(chosen)} mutants; the tests pass without one", flush=True)
        python = [m for m in chosen if not m.compiled]
        queues = [python[i :: max(len(trees) - 1, 1)] for i in range(max(len(trees) - 1, 1))]
        queues = (
            [[m for m in chosen if m.compiled], *queues]
            if len(trees) > 1
            else [python + [m for m in chosen if m.compiled]]
        )
        with ThreadPoolExecutor(len(trees)) as pool:
            results = [r for part in pool.map(several, trees, queues) for r in part]
    alive = [(m.name, state) for m, state, _ in results if state != "killed"]
    print(f"{len(results) - len(alive)} of {len(results)} killed", *alive, sep="\n  ")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
