"""Draw a CSV of bench.py: time of a layer against the number of tokens, one line a system.

python benchmarks/plot.py benchmarks/results/moe_cpu_avx2.csv docs/images/moe_cpu_avx2.png
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = {
    "native_cpu": "mxfp4_ops, packed",
    "torch_bf16": "torch loop, expanded to bf16 (3.8x memory)",
    "torch_fp32": "torch loop, expanded to fp32 (7.5x memory)",
}


def main(source: Path, target: Path) -> None:
    rows = list(csv.DictReader(source.open()))
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        lines[row["system"]].append((int(row["tokens"]), float(row["ms_p50"])))
    figure, axis = plt.subplots(figsize=(7, 4.2), dpi=120)
    for name, points in lines.items():
        axis.plot(*zip(*points, strict=True), marker="o", label=LABELS.get(name, name))
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms a layer")
    axis.set_xticks([p[0] for p in points], [str(p[0]) for p in points])
    first = rows[0]
    axis.set_title(
        f"{first['problem']} layer, {first['chip']}, {first['arch']}, {first['threads']} threads", fontsize=10
    )
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
