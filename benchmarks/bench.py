"""Time the ops beside what users have without them, check every result, and say how far each is from the machine's
ceiling.

    python benchmarks/bench.py moe --problem gptoss --tokens 1,16,64,1024 --csv benchmarks/results/moe_cpu.csv
    python benchmarks/bench.py format --csv benchmarks/results/format_cpu.csv

Every row holds the median of alternating rounds (timing.py), the bytes that the call must read, GB/s and GFLOP/s, the
share of the roofline (ceilings.py), the error against float64, and what is needed to repeat it.
"""

from __future__ import annotations

import argparse
import csv
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import ceilings
import systems
from mxfp4_ops import Activation, arch_of, dequant_mxfp4, format, qdq_mxfp4, quant_mxfp4
from problems import Problem, answer, errors, weights
from timing import Times, alternate

PROBLEMS = {
    "gptoss": (Problem("gptoss", 32, 2880, 2880, 4, 1, "swigluoai"), Activation("swigluoai", limit=7.0)),
    "qwen3": (Problem("qwen3", 128, 2048, 768, 8, 1, "silu", bias=False), Activation("silu")),
    "tiny": (Problem("tiny", 8, 256, 256, 2, 1, "swigluoai"), Activation("swigluoai", limit=7.0)),
}
SYSTEMS = {
    "native_cpu": lambda e, a: systems.ours("native_cpu", e, a),
    "native_cpu_invariant": lambda e, a: systems.ours("native_cpu", e, a, batch_invariant=True),
    "reference": lambda e, a: systems.ours("reference", e, a),
    "torch_bf16": lambda e, a: systems.torch_loop(torch.bfloat16, e, a),
    "torch_fp32": lambda e, a: systems.torch_loop(torch.float32, e, a),
}


def machine() -> dict[str, str]:
    """What a reader needs to judge a number."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "chip": name,
        "arch": arch_of("cpu"),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "command": shlex.join(["python", *sys.argv]),
    }


def routed(problem: Problem, tokens: int, rounds: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs for each round; experts are drawn without repeats in a row, and others each round."""
    g = torch.Generator().manual_seed(tokens)
    out = []
    for _ in range(rounds + 1):
        x = torch.randn(tokens, problem.hidden, generator=g).bfloat16()
        scores = torch.rand(tokens, problem.experts, generator=g)
        routing, ids = scores.topk(problem.top_k)
        out.append((x, ids, routing / routing.sum(-1, keepdim=True)))
    return out


def bench_moe(args: argparse.Namespace) -> list[dict[str, Any]]:
    problem, activation = PROBLEMS[args.problem]
    experts = weights(problem, low=119, high=121)
    names = args.systems.split(",")
    layers = {name: SYSTEMS[name](experts, activation) for name in names}
    bandwidth = ceilings.read_bandwidth()
    rate = max(ceilings.matmul_rate(torch.float32), ceilings.matmul_rate(torch.bfloat16))
    print(f"ceilings: {bandwidth / 1e9:.1f} GB/s read, {rate / 1e9:.0f} GFLOP/s by torch's best product\n")
    rows = []
    for tokens in map(int, args.tokens.split(",")):
        calls = routed(problem, tokens, args.rounds)
        timed = {name: (lambda r, run=layer, inputs=calls: run(*inputs[r])) for name, layer in layers.items()}
        times = alternate(timed, torch.device("cpu"), rounds=args.rounds, seconds=args.seconds)
        used = sum(len(ids.unique()) for _, ids, _ in calls) / len(calls)
        weight = 3 * problem.hidden * problem.intermediate  # elements of one expert
        flops, packed_bytes = 2 * tokens * problem.top_k * weight, used * weight * 17 / 32
        wanted = answer(experts, *(t[:16] for t in calls[0]), activation) if args.check else None
        for name in names:
            error = errors(layers[name](*(t[:16] for t in calls[0])), wanted)[0] if wanted is not None else None
            floor = max(packed_bytes / bandwidth, flops / rate)
            rows.append(row(args, tokens, name, times[name], packed_bytes, flops, floor, error))
            show(
                rows[-1],
                min(times[n].p50 for n in names if n.startswith("torch"))
                if any(n.startswith("torch") for n in names)
                else None,
            )
    return rows


def row(
    args: argparse.Namespace,
    tokens: int,
    name: str,
    t: Times,
    size: float,
    flops: float,
    floor: float,
    error: float | None,
) -> dict[str, Any]:
    return {
        "problem": args.problem,
        "tokens": tokens,
        "system": name,
        "ms_p20": round(t.p20 * 1e3, 3),
        "ms_p50": round(t.p50 * 1e3, 3),
        "ms_p80": round(t.p80 * 1e3, 3),
        "rounds": t.rounds,
        "packed_MB": round(size / 1e6, 1),
        "packed_GB_s": round(size / t.p50 / 1e9, 1),
        "GFLOP_s": round(flops / t.p50 / 1e9, 1),
        "share_of_roofline": round(floor / t.p50, 3),
        "rel_l2_error": None if error is None else float(f"{error:.2e}"),
        **machine(),
    }


def show(r: dict[str, Any], torch_best: float | None) -> None:
    times = "" if torch_best is None else f"  {torch_best * 1e3 / r['ms_p50']:6.2f}x best torch loop"
    error = "" if r["rel_l2_error"] is None else f"  error {r['rel_l2_error']:.1e}"
    speed = f"{r['packed_GB_s']:>6.1f} GB/s  {r['GFLOP_s']:>7.1f} GFLOP/s"
    share = f"{100 * r['share_of_roofline']:5.1f} % of roofline"
    name = f"{r['problem']:>8} T={r['tokens']:<5} {r['system']:<22}"
    print(f"{name} {r['ms_p50']:>10.3f} ms  {speed}  {share}{error}{times}", flush=True)


def bench_format(args: argparse.Namespace) -> list[dict[str, Any]]:
    """quant, dequant and qdq of bfloat16, the op beside its plain-torch definition."""
    x = torch.randn(4096, 4096).bfloat16()
    blocks, scales = quant_mxfp4(x)
    size = x.numel() * (2 + 17 / 32)
    pairs: dict[str, Any] = {
        "quant": (lambda: quant_mxfp4(x), lambda: format.quant(x, "even")),
        "dequant": (lambda: dequant_mxfp4(blocks, scales), lambda: format.dequant(blocks, scales, torch.bfloat16)),
        "qdq": (lambda: qdq_mxfp4(x), lambda: format.dequant(*format.quant(x, "even"), x.dtype)),
    }
    bandwidth, rows = ceilings.read_bandwidth(), []
    print(f"ceiling: {bandwidth / 1e9:.1f} GB/s read\n")
    for name, (op, definition) in pairs.items():
        moved = x.numel() * 4 if name == "qdq" else size
        found, wanted = op(), definition()
        equal = all(
            torch.equal(a, b) for a, b in zip(*([r] if torch.is_tensor(r) else r for r in (found, wanted)), strict=True)
        )
        calls = {"op": lambda r, f=op: f(), "definition": lambda r, f=definition: f()}
        for system, t in alternate(calls, torch.device("cpu"), rounds=args.rounds, seconds=args.seconds).items():
            rows.append(
                row(args, 4096, f"{name}_{system}", t, moved, 0, moved / bandwidth, 0.0 if equal else float("nan"))
            )
            show(rows[-1], None)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["moe", "format"])
    parser.add_argument("--problem", choices=PROBLEMS, default="gptoss")
    parser.add_argument("--systems", default="native_cpu,torch_bf16,torch_fp32", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--tokens", default="1,4,16,64,256,1024")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="stop a row's rounds after this long (three at least)"
    )
    parser.add_argument("--no-check", dest="check", action="store_false", help="leave the float64 answer out")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    args.problem = "4096x4096" if args.what == "format" else args.problem
    with torch.inference_mode():  # as generation runs
        rows = bench_format(args) if args.what == "format" else bench_moe(args)
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
