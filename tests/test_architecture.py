"""What holds the structure up: the direction of imports, one reader of the environment, sizes of files and
functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mxfp4_ops
import pytest

PACKAGE = Path(mxfp4_ops.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(PACKAGE.rglob("*.py"))
# A module may import from lines above its own, and from its own line only where the package's __init__ gathers a
# folder.
LAYERS = (
    ("errors", "_schemas", "eager", "packages"),
    ("_extension", "argument_checks", "format", "layout", "routing"),
    ("activation", "route_gradient"),
    ("x_formats",),
    ("reference", "problem", "experts", "scale_search"),
    ("quant_modes",),
    ("backends.base",),
    ("backends.*",),
    ("backends",),
    ("dispatch", "packing"),
    ("checks", "token_checks"),
    ("call_plan",),
    ("moe_call", "route_call", "packed_topk"),
    ("moe_backward", "unfinalized"),
    ("_ops", "functional"),
    ("autograd", "debug", "packed"),
    ("nn", "prepare", "quantize"),
    ("checkpoint", "export"),
    ("integrations.*",),
    ("integrations",),
    ("demo.*",),
    ("demo",),
    ("__main__",),
    ("__init__",),
)
# The only readers of the environment: dispatch (MXFP4_BACKEND). MXFP4_CPU_ISA is read in csrc/cpu/isa.cpp.
ENVIRONMENT = {"dispatch"}


def module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def layer(name: str) -> int:
    for i, row in enumerate(LAYERS):
        if name in row:
            return i
    for i, row in enumerate(LAYERS):
        if f"{name.partition('.')[0]}.*" in row and "." in name:
            return i
    raise AssertionError(f"{name} has no place in LAYERS")


def imports(path: Path) -> list[str]:
    """Modules of this package that a file imports at its top level."""
    here = path.relative_to(PACKAGE).parent.parts
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
            base = [b for b in base if b]
            candidates = [".".join([*base, a.name]) for a in node.names]
            for name in candidates:
                exists = (PACKAGE / Path(*name.split("."))).with_suffix(".py").exists() or (
                    PACKAGE / Path(*name.split("."))
                ).is_dir()
                found.append(name if exists else ".".join(base))
    return [name for name in found if name]


@pytest.mark.parametrize("path", SOURCES, ids=[module(p) for p in SOURCES])
def test_imports_point_one_way(path: Path) -> None:
    name = module(path)
    for imported in imports(path):
        inside = name.partition(".")[0] == imported.partition(".")[0] and not name.startswith("backends")
        assert layer(imported) < layer(name) or (inside and layer(imported) == layer(name)), (
            f"{name} imports {imported}"
        )


def test_a_backend_imports_no_other_backend() -> None:
    for path in (PACKAGE / "backends").glob("*.py"):
        if path.stem not in ("__init__", "base"):
            assert not {f"backends.{p.stem}" for p in (PACKAGE / "backends").glob("*.py")} - {"backends.base"} & set(
                imports(path)
            )


@pytest.mark.parametrize("path", SOURCES, ids=[module(p) for p in SOURCES])
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    reads = "os.environ" in path.read_text() or "getenv" in path.read_text()
    assert not reads or module(path) in ENVIRONMENT


def code_files() -> list[Path]:
    folders = ("python", "csrc", "tests", "benchmarks", "examples")
    kinds = {".py", ".cpp", ".h", ".cu", ".cuh"}
    return [p for f in folders for p in sorted((ROOT / f).rglob("*")) if p.suffix in kinds and "build" not in p.parts]


def test_files_are_short_enough_to_read() -> None:
    long = {str(p.relative_to(ROOT)): n for p in code_files() if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_functions_are_short_enough_to_read() -> None:
    long = []
    for path in (p for p in code_files() if p.suffix == ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 60:
                long.append(f"{path.name}:{node.name}")
    assert not long


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_p1_importing_loads_torch_and_nothing_else() -> None:
    """No vendor library, no test or demo library, and under two seconds beyond torch (rule P1)."""
    out = run(
        "import torch, sys, time; before = set(sys.modules); t = time.perf_counter(); import mxfp4_ops\n"
        "print(time.perf_counter() - t, sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    seconds, _, names = out.partition(" ")
    assert float(seconds) < 2.0
    foreign = {"triton", "flashinfer", "triton_kernels", "deep_gemm", "aiter", "transformers", "safetensors", "numpy"}
    assert not foreign & set(ast.literal_eval(names.strip()))


def test_p1_the_package_works_without_its_compiled_part() -> None:
    """As MXFP4_BUILD=none installs it: the same numbers by plain torch, and a reason instead of an error."""
    out = run(
        "import torch, warnings; warnings.simplefilter('ignore')\n"
        "from mxfp4_ops import _extension\n"
        "import mxfp4_ops.format as f\n"
    ) + run(
        "import pathlib, warnings; warnings.simplefilter('ignore')\n"
        "exists = pathlib.Path.exists\n"
        "pathlib.Path.exists = lambda self, **k: self.suffix != '.so' and exists(self, **k)\n"
        "import torch, mxfp4_ops as m\n"
        "b, s = m.quant_mxfp4(torch.randn(1, 64, 32)); d, t = m.quant_mxfp4(torch.randn(1, 32, 32))\n"
        "w = m.ExpertWeights(b, s, None, d, t, None)\n"
        "print(m.explain(m.problem_of(w)))\n"
        "print(m.prepare(w)(torch.randn(3, 32), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)).shape)\n"
    )
    assert "native_cpu: needs the compiled kernels: the compiled CPU library is absent" in out
    assert "reference: selected" in out and "torch.Size([3, 32])" in out


def test_a_wrong_instruction_set_is_named_at_first_use() -> None:
    out = run(
        "import os; os.environ['MXFP4_CPU_ISA'] = 'avx1024'\n"
        "import torch, mxfp4_ops\n"
        "try: torch.ops.mxfp4.quant(torch.ones(32))\n"
        "except RuntimeError as e: print(e)\n"
    )
    assert "avx1024" in out and "scalar" in out


@pytest.mark.parametrize("isa", ["scalar"])
def test_the_instruction_set_can_be_lowered(isa: str) -> None:
    out = run(f"import os; os.environ['MXFP4_CPU_ISA'] = '{isa}'\nimport mxfp4_ops; print(mxfp4_ops.arch_of('cpu'))")
    assert out.strip() == f"cpu_{isa}"


def test_public_names_are_documented() -> None:
    for name in mxfp4_ops.__all__:
        value = getattr(mxfp4_ops, name)
        if callable(value):
            assert value.__doc__ and not value.__doc__.startswith(f"{name}("), name


def test_a_source_distribution_can_be_built_and_tested() -> None:
    """setuptools takes the package and tests/test_*.py by itself, and nothing else."""
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    for folder in ("benchmarks", "build_backend", "csrc", "docs", "tests"):
        assert f"graft {folder}" in lines
    assert "CMakeLists.txt" in next(line for line in lines if line.startswith("include")).split()


def test_compiled_code_uses_no_streams() -> None:
    """Where g++ links libstdc++ into the library and torch uses another copy, a stream in it crashes the process."""
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h", ".cu", ".cuh")]
    assert sources
    for path in sources:
        text = "\n".join(line.split("//")[0] for line in path.read_text().splitlines())
        for word in ("STD_TORCH_CHECK(", "<sstream>", "<iostream>", "stringstream"):
            assert word not in text, f"{path.name}: {word}"
