"""``route`` beside the routers of transformers, run on the same random weights and hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mxfp4_ops import route
from torch import Tensor
from transformers.models.deepseek_v2 import configuration_deepseek_v2 as v2_config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import configuration_deepseek_v3 as v3_config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.deepseek_v4 import configuration_deepseek_v4 as v4_config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.gpt_oss import configuration_gpt_oss as oss_config
from transformers.models.gpt_oss import modeling_gpt_oss as oss
from transformers.models.llama4 import configuration_llama4 as llama4_config
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.longcat_flash import modeling_longcat_flash as longcat

TOKENS, HIDDEN, EXPERTS, TOP_K = 50, 32, 24, 4


def filled(router: Any) -> Any:
    """The router with random weights and, where it has one, a random correction bias."""
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in (*router.named_parameters(), *router.named_buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=g) / (8 if "correction" in name else 2))
    return router


def hidden_states() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(12))


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], exact_order: bool = False) -> None:
    """Compare ids and weights; most routers return them in no order, so both are sorted by id."""
    (ids, weights), (their_ids, their_weights) = ours, theirs
    if not exact_order:
        order, their_order = ids.argsort(-1), their_ids.argsort(-1)
        ids, weights = ids.gather(1, order), weights.gather(1, order)
        their_ids, their_weights = their_ids.gather(1, their_order), their_weights.gather(1, their_order)
    assert torch.equal(ids.long(), their_ids.long())
    torch.testing.assert_close(weights, their_weights.float(), rtol=4e-6, atol=0)


def test_gpt_oss() -> None:
    router = filled(
        oss.GptOssTopKRouter(
            oss_config.GptOssConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
        )
    )
    logits, weights, ids = router(hidden_states())
    assert_same(route(logits, TOP_K, "topk_softmax"), (ids, weights), exact_order=True)


def deepseek_sizes(**more: Any) -> dict[str, Any]:
    return {"hidden_size": HIDDEN, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, **more}


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2(method: str) -> None:
    groups = {"n_group": 8, "topk_group": 3} if method == "group_limited_greedy" else {"n_group": 1, "topk_group": 1}
    config = v2_config.DeepseekV2Config(**deepseek_sizes(topk_method=method, routed_scaling_factor=16.0, **groups))
    logits, weights, ids = filled(v2.DeepseekV2TopkRouter(config))(hidden_states())
    ours = route(
        logits, TOP_K, groups=groups["n_group"], topk_groups=groups["topk_group"], renormalize=False, scale=16.0
    )
    assert_same(ours, (ids, weights))


@pytest.mark.parametrize("renormalize", [True, False])
def test_deepseek_v3(renormalize: bool) -> None:
    config = v3_config.DeepseekV3Config(
        **deepseek_sizes(n_group=8, topk_group=3, norm_topk_prob=renormalize, routed_scaling_factor=2.5)
    )
    router = filled(v3.DeepseekV3TopkRouter(config))
    logits, weights, ids = router(hidden_states())
    options = {"groups": 8, "topk_groups": 3, "renormalize": renormalize, "scale": 2.5}
    ours = route(logits, TOP_K, "sigmoid_topk", correction_bias=router.e_score_correction_bias, **options)
    assert_same(ours, (ids, weights))


def v4_router(kind: Any) -> Any:
    sizes = deepseek_sizes(vocab_size=40, routed_scaling_factor=1.5)
    return filled(kind(v4_config.DeepseekV4Config(**sizes)))


def test_deepseek_v4() -> None:
    router = v4_router(v4.DeepseekV4TopKRouter)
    logits, weights, ids = router(hidden_states())
    ours = route(logits, TOP_K, "sqrtsoftplus_topk", correction_bias=router.e_score_correction_bias, scale=1.5)
    assert_same(ours, (ids, weights))


def test_deepseek_v4_hash_layer() -> None:
    router = v4_router(v4.DeepseekV4HashRouter)
    g = torch.Generator().manual_seed(13)
    router.tid2eid.copy_(torch.randint(EXPERTS, router.tid2eid.shape, generator=g))
    tokens = torch.randint(40, (TOKENS,), generator=g)
    logits, weights, ids = router(hidden_states(), tokens)
    ours = route(logits, TOP_K, "sqrtsoftplus_topk", input_ids=tokens, hash_table=router.tid2eid, scale=1.5)
    assert_same(ours, (ids, weights), exact_order=True)


def test_llama4() -> None:
    config = llama4_config.Llama4TextConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=1)
    scores, logits = filled(llama4.Llama4Router(config))(hidden_states())
    weights, ids = scores.max(-1, keepdim=True)  # zero but for the chosen expert
    assert_same(route(logits, 1, "topk_sigmoid", renormalize=False), (ids, weights))


def test_longcat_flash() -> None:
    """Softmax with a correction bias."""

    @dataclass
    class Config:
        hidden_size: int = HIDDEN
        num_experts_per_tok: int = TOP_K
        num_local_experts: int = EXPERTS
        n_routed_experts: int = EXPERTS
        zero_expert_num: int = 0
        routed_scaling_factor: float = 6.0

    router = filled(longcat.LongcatFlashTopkRouter(Config()))
    logits, weights, ids = router(hidden_states())
    bias = router.e_score_correction_bias
    assert_same(route(logits, TOP_K, correction_bias=bias, renormalize=False, scale=6.0), (ids, weights))
