"""Call every op with random, often wrong arguments: each call is refused by a sentence, or returns the right result.

    python tests/fuzz.py --calls 100000 --seed 1        all of them, in a child process
    python tests/fuzz.py --seed 1 --only 4711           one of them, here

A refusal is one of four, and no other error is let through:
  ValueError, TypeError, Unsupported   ours: the text begins with the op's name (an alias may name what it stands for)
  RuntimeError                         torch's own, where an argument is no value of the schema's type ("mxfp4::moe()
                                       Expected a value of type 'Tensor' ..."): it comes before any code of ours;
                                       for an op with overloads one sentence for each follows a line that says so
Results are compared by fuzz_answers.py; inputs keep their bytes, results share no storage with them.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import mxfp4_ops
import torch
from fuzz_answers import ANSWERS
from fuzz_calls import FUNCTIONS, OPS, Call
from fuzz_changes import make
from fuzz_layout_answers import plain, raw
from torch import Tensor

STANDS_FOR = {
    "mxfp4_moe": "moe",
    "function": "moe",
    "dequant_mxfp4": "dequant",
    "qdq_mxfp4": "qdq",
    "dequant.out": "dequant",
    "moe.out": "moe",
}
MUTATED = {"repack_expert": "packed", "dequant.out": "out", "moe.out": "out"}
LEAST_ACCEPTED = 0.4
_PREFIXES = ("mxfp4::", "mxfp4_ops.")
_OVERLOADED = "Overloaded torch operator invoked from Python failed to match any schema:\n"


class Wrong(Exception):
    """The package did something that it must not do."""


def show(value: Any) -> str:
    if isinstance(value, Tensor):
        grad = ", requires_grad" if value.requires_grad else ""
        return f"{str(value.dtype)[6:]}{list(value.shape)} strides {list(value.stride())} on {value.device}{grad}"
    return f"[{'; '.join(map(show, value))}]" if isinstance(value, list) else repr(value)


def describe(call: Call) -> str:
    lines = [f"op {call.op}, changes {call.changes}"] + [f"  {n} = {show(v)}" for n, v in call.args.items()]
    return "\n".join(lines)


def invoke(call: Call) -> Any:
    if call.op == "quantize_experts":  # hands biases on as they are
        made = mxfp4_ops.quantize_experts(**call.args)
        if made.w13_bias is not call.args["w13_bias"] or made.w2_bias is not call.args["w2_bias"]:
            raise Wrong("another bias")
        return [made.w13, made.w13_scale, made.w2, made.w2_scale]
    if call.op in FUNCTIONS:
        return FUNCTIONS[call.op](**call.args)
    op, _, overload = call.op.partition(".")
    return (getattr(getattr(OPS, op), overload) if overload else getattr(OPS, op))(**call.args)


def check_refusal(call: Call, error: Exception) -> None:
    names = {call.op, STANDS_FOR.get(call.op, call.op)} - {"function"}
    text = str(error)
    kinds = (ValueError, TypeError, NotImplementedError if call.op == "moe_backward" else mxfp4_ops.Unsupported)
    ours = isinstance(error, kinds) and text.startswith(tuple(f"{p}{n}: " for p in _PREFIXES for n in names))
    text = text.removeprefix(_OVERLOADED)
    schema = type(error) is RuntimeError and text.startswith(tuple(f"mxfp4::{n}() " for n in names))
    if not (ours or schema):
        raise Wrong(f"{type(error).__name__} is no refusal: {text[:300]}") from error
    if call.valid:
        raise Wrong(f"a valid call was refused: {text[:300]}") from error


def check_result(call: Call, out: Any, before: dict[str, Tensor]) -> None:
    tensors = call.tensors()
    made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
    if any(t.device.type == "meta" for t in tensors.values()):
        if not all(t.device.type == "meta" for t in (*tensors.values(), *made)):
            raise Wrong("tensors of two devices were accepted")
        return
    kept = MUTATED.get(call.op, "")
    for name, old in before.items():
        same = torch.equal(raw(tensors[name]), old)
        if not same and not (kept and name.partition("[")[0] == kept):
            raise Wrong(f"{name} was changed")
    storages = {t.untyped_storage().data_ptr() for t in tensors.values() if t.numel()}
    if any(t.untyped_storage().data_ptr() in storages for t in made if t.numel()):
        raise Wrong("a result shares storage with an argument")
    if not all(t.is_contiguous() for t in made):
        raise Wrong("a result is strided")
    try:
        ANSWERS[call.op](call, out)
    except AssertionError as error:
        raise Wrong(f"wrong result: {error}") from error


def attempt(call: Call) -> str:
    """Make the call; return what came of it, or raise Wrong."""
    before = {n: raw(t) for n, t in call.tensors().items() if t.device.type == "cpu"}
    if call.op == "repack_expert":
        call.facts["packed"] = [plain(t).clone() for t in call.args["packed"] if isinstance(t, Tensor)]
    try:
        out = invoke(call)
    except Exception as error:
        check_refusal(call, error)
        return "refused"
    with torch.no_grad():
        check_result(call, torch.utils._pytree.tree_map_only(Tensor, torch.detach, out), before)
    return "accepted"


def run(calls: int, seed: int, progress: int | None = None) -> dict[str, collections.Counter[str]]:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for index in range(calls):
        if progress is not None:
            os.pwrite(progress, b"%-12d" % index, 0)
        call = make(seed, index)
        try:
            counts[call.op][attempt(call)] += 1
        except Wrong as error:
            raise Wrong(f"call {index} of seed {seed}: {error}\n{describe(call)}") from error
    return counts


def table(counts: dict[str, dict[str, int]]) -> str:
    lines = [f"{'op':16}{'accepted':>10}{'refused':>10}"]
    for op in sorted(counts):
        lines.append(f"{op:16}{counts[op].get('accepted', 0):10}{counts[op].get('refused', 0):10}")
    total = [sum(c.get(kind, 0) for c in counts.values()) for kind in ("accepted", "refused")]
    share = total[0] / max(sum(total), 1)
    lines.append(f"{'all':16}{total[0]:10}{total[1]:10}   {share:.0%} accepted and compared")
    return "\n".join(lines)


def check_counts(counts: dict[str, dict[str, int]]) -> None:
    """The run says something only when every op was accepted and refused, and results were often compared."""
    accepted, refused = (sum(c.get(k, 0) for c in counts.values()) for k in ("accepted", "refused"))
    assert set(counts) == set(ANSWERS), set(ANSWERS) - set(counts)
    assert all(c.get("accepted") and c.get("refused") for c in counts.values()), counts
    assert accepted / (accepted + refused) > LEAST_ACCEPTED


def in_child(calls: int, seed: int) -> int:
    """Run in another process, so that a crash is a failure with the number of its call."""
    with tempfile.TemporaryDirectory() as folder:
        progress, result = Path(folder) / "index", Path(folder) / "counts"
        command = [sys.executable, __file__, "--child", str(folder), "--calls", str(calls), "--seed", str(seed)]
        status = subprocess.run(command, check=False).returncode
        if status:
            again = f"python tests/fuzz.py --seed {seed} --only {progress.read_text().strip()}"
            print(f"failed with status {status}{' (crash)' if status < 0 else ''}; the call alone: {again}")
            return 1
        counts = json.loads(result.read_text())
    print(table(counts))
    check_counts(counts)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.only is not None:
        call = make(options.seed, options.only)
        print(describe(call))
        print(attempt(call))
        return 0
    if options.child is None:
        return in_child(options.calls, options.seed)
    try:
        counts = run(options.calls, options.seed, os.open(options.child / "index", os.O_WRONLY | os.O_CREAT))
    except Wrong as error:
        print(error)
        return 1
    (options.child / "counts").write_text(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
