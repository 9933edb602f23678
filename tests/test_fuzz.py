"""Random calls of every op in a process of their own; ``python tests/fuzz.py --calls 100000`` makes more of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import Wrong, attempt, check_counts
from fuzz_answers import ANSWERS
from fuzz_changes import make
from mxfp4_ops import _schemas

FUZZ = Path(__file__).parent / "fuzz.py"


def test_two_thousand_random_calls() -> None:
    done = subprocess.run([sys.executable, str(FUZZ), "--calls", "2000", "--seed", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted and compared" in done.stdout


def test_every_public_op_is_called_and_answered() -> None:
    """Makers too: check_counts, which ends the run above, misses an answer that no call was made for."""
    assert not set(_schemas.PUBLIC | _schemas.ALIASES) - set(ANSWERS)
    assert {make(1, index).op for index in range(2000)} == set(ANSWERS)


def test_a_call_is_the_same_whenever_it_is_made() -> None:
    assert [attempt(make(5, i)) for i in range(20)] == [attempt(make(5, i)) for i in range(20)]


@pytest.mark.parametrize("op", sorted(ANSWERS))
def test_a_wrong_result_is_noticed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer of an op whose result is off by one bit, or of another row, fails within a few calls."""
    import fuzz
    import torch

    real = fuzz.invoke

    def spoilt(call: fuzz.Call) -> object:
        out = real(call)
        kept = call.args["packed"] if call.op == "repack_expert" else call.args.get("out", out)
        for tensor in torch.utils._pytree.tree_leaves(kept):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                bytes_ = tensor.dtype is torch.float8_e4m3fn
                (tensor.view(torch.uint8) if bytes_ else tensor.detach()).add_(1)
        return out

    monkeypatch.setattr(fuzz, "invoke", spoilt)
    calls = (call for call in (make(7, i) for i in range(3000)) if call.op == op)
    with pytest.raises(Wrong):
        for call in calls:
            attempt(call)


def test_a_run_without_refusals_is_no_proof() -> None:
    with pytest.raises(AssertionError):
        check_counts({op: {"accepted": 5} for op in ANSWERS})


def test_another_error_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    import fuzz

    def broken(call: fuzz.Call) -> object:
        raise KeyError("w13")

    monkeypatch.setattr(fuzz, "invoke", broken)
    with pytest.raises(Wrong, match="KeyError is no refusal"):
        attempt(make(1, 0))
