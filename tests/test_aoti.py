"""AOTInductor packages, with Python and without: the bits of eager, for every number of tokens, and the same refusals.

Compiling is what takes the time here, so that one lowered package and one program serve all tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from mxfp4_ops import Activation, MXFP4Experts, prepare
from mxfp4_ops.export import lower, native_libraries
from problems import Problem, inputs, weights
from torch import Tensor

OPS = torch.ops.mxfp4
# No size equals a number of tokens, so that no symbol can be mistaken for another.
PROBLEM = Problem("aoti", 7, 96, 160, 4, 64, activation="swigluoai")
TOKENS = (1, 2, 5, 64)
ORDER = torch.tensor([6, 2, 9, 0, 4, 3, 11], dtype=torch.int32)
PROGRAM = Path(__file__).parent / "aoti" / "run_package.cpp"
DOCUMENT = Path(__file__).parents[1] / "docs" / "export.md"
SCALAR_TYPES = {  # c10::ScalarType, which has no name in Python
    torch.uint8: 0, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6, torch.bfloat16: 15,
}  # fmt: skip


class Model(torch.nn.Module):
    """Two expert layers, one of them a shard without biases and without a limit; a quantized linear; every other op."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = MXFP4Experts(prepare(weights(PROBLEM), activation=Activation("swigluoai", limit=7.0)))
        self.shard = MXFP4Experts(prepare(weights(PROBLEM.with_(activation="silu", bias=False), seed=2)))
        blocks, scales = OPS.quant(torch.randn(32, PROBLEM.hidden, generator=torch.Generator().manual_seed(3)))
        self.register_buffer("blocks", blocks)
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor, ids: Tensor, routing: Tensor, order: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        y = self.experts(x, ids, routing)
        z = self.shard(y, ids, routing, order)
        linear = OPS.dequant(self.blocks, self.scales)
        return (y, z, linear, *OPS.quant(z), OPS.qdq(z), *OPS.route(logits, None, None, None, 3))


class Experts(torch.nn.Module):
    """One layer, as it stands in a program that is not lowered."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Model().experts

    def forward(self, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return self.experts(x, ids, routing)


def arguments(count: int) -> tuple[Tensor, ...]:
    logits = torch.randn(PROBLEM.tokens, PROBLEM.experts, generator=torch.Generator().manual_seed(4))
    x, ids, routing, logits = (t[:count].clone() for t in (*inputs(PROBLEM), logits))
    return x, ids, routing, ORDER, logits


def package(program: torch.export.ExportedProgram, path: Path) -> Path:
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=quick)
    return path


def export(module: torch.nn.Module, *args: Tensor) -> torch.export.ExportedProgram:
    tokens = {0: torch.export.Dim("T", min=1, max=4096)}
    return torch.export.export(module, args, dynamic_shapes=[None if t is ORDER else tokens for t in args])


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(lower(export(Model(), *arguments(5))), tmp_path_factory.mktemp("aoti") / "lowered.pt2")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/aoti/run_package.cpp, compiled against the installed torch."""
    torch_folder, path = Path(torch.__file__).parent, tmp_path_factory.mktemp("program") / "run_package"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O0", f"-I{torch_folder}/include", str(PROGRAM)]
    command += ["-o", str(path), f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib", "-Wl,--no-as-needed"]
    subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
    return path


def write(path: Path, tensors: tuple[Tensor, ...]) -> Path:
    with path.open("wb") as file:
        for t in tensors:
            file.write(" ".join(map(str, (SCALAR_TYPES[t.dtype], t.dim(), *t.shape))).encode() + b"\n")
            file.write(t.contiguous().view(torch.uint8).numpy().tobytes())
    return path


def read(path: Path) -> list[Tensor]:
    data, tensors = path.read_bytes(), []
    dtypes = {code: dtype for dtype, code in SCALAR_TYPES.items()}
    while data:
        line, _, data = data.partition(b"\n")
        code, _, *sizes = map(int, line.split())
        count = torch.Size(sizes).numel() * dtypes[code].itemsize
        tensors.append(torch.frombuffer(bytearray(data[:count]), dtype=dtypes[code]).reshape(sizes))
        data = data[count:]
    return tensors


def without_python(program: Path, package: Path, args: tuple[Tensor, ...], libraries: list[Path]) -> Any:
    """Run the program in an environment that names no Python; it fails if libpython is in its process."""
    folder = program.parent
    found = folder / "outputs"
    found.unlink(missing_ok=True)
    command = [program, package, write(folder / "inputs", args), found, *libraries]
    environment = {"PATH": os.defpath, "TMPDIR": str(folder)}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    return done, read(found) if found.exists() else None


def compare(found: Any, wanted: tuple[Tensor, ...]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


def test_a_lowered_package_gives_the_eager_bits(lowered: Path) -> None:
    run, model = torch._inductor.aoti_load_package(str(lowered)), Model()
    for count in TOKENS:
        compare(run(*arguments(count)), model(*arguments(count)))


def test_a_lowered_package_needs_no_python(lowered: Path, program: Path) -> None:
    model = Model()
    for count in TOKENS:
        done, found = without_python(program, lowered, arguments(count), native_libraries())
        assert done.returncode == 0, done.stderr
        compare(found, model(*arguments(count)))


def test_without_python_the_refusals_are_the_same(lowered: Path, program: Path) -> None:
    x, ids, routing, order, logits = arguments(5)
    for wrong, sentence in (
        ((x, ids + 7, routing, order, logits), "moe: topk_ids must be -1 (skip) or below the number of experts."),
        ((x, ids, routing, order // 2, logits), "localise: expert_ids must not repeat."),
    ):
        done, found = without_python(program, lowered, wrong, native_libraries())
        assert done.returncode == 1 and found is None and f"mxfp4::{sentence}" in done.stderr


def test_the_program_would_notice_python(lowered: Path, program: Path, tmp_path: Path) -> None:
    disguised = shutil.copy(native_libraries()[0], tmp_path / "libpython3.so")
    done, _ = without_python(program, lowered, arguments(5), [*native_libraries(), disguised])
    assert done.returncode == 1 and "Python is in this process" in done.stderr


def test_without_the_libraries_the_missing_op_is_named(lowered: Path, program: Path) -> None:
    done, _ = without_python(program, lowered, arguments(5), [])
    assert done.returncode == 1 and "mxfp4::_native" in done.stderr


def test_a_package_that_is_not_lowered_runs_beside_python(tmp_path: Path) -> None:
    layer = Experts()
    run = torch._inductor.aoti_load_package(str(package(export(layer, *arguments(5)[:3]), tmp_path / "as_is.pt2")))
    for count in TOKENS:
        args = arguments(count)[:3]
        assert torch.equal(run(*args), layer(*args))


def test_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    text = DOCUMENT.read_text()
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.S):
        exec(compile(code, str(DOCUMENT), "exec"), names)
    assert capsys.readouterr().out.split() == [str(path) for path in native_libraries()]
    (code,) = re.findall(r"```cpp\n(.*?)```", text, flags=re.S)
    assert set(code.splitlines()) <= set(PROGRAM.read_text().splitlines())
