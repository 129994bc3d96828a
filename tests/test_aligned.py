"""Models patched with the operators: full and token-wise logits agree in raw bits, and what cannot is refused by name."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tools.aligned.cache import KVCache
from tools.aligned.gradients import Layers
from tools.aligned.operators import Operators, load_operators
from tools.aligned.trace import first_difference, recorded, words
from tools.core.errors import UserError
from tools.load_kernel import load_kernel

pytest.importorskip("transformers", reason="transformers is not installed (it needs Python 3.11): pip install '.[models]'")

from tools.aligned import families, forwards, rollout
from tools.aligned.families import SHAPES, small_model
from tools.aligned.forwards import ATTENTION
from tools.aligned.patch import aligned_of, patch_model, unpatch_model
from tools.aligned.reuse import AuditedReuse, BitMismatch, Rollout, record, weights_digest
from tools.aligned.rollout import equal_bits, full_logits, generate, padded, replay, replay_logits, score
from tools.demo_ratio import main as demo

Tensor = torch.Tensor
FAMILIES = tuple(SHAPES)
PROMPTS, RESPONSES = (1, 5, 17, 64, 65, 131), (9, 3, 1, 7, 2, 5)  # tokens: both sides of attention's tile of 64 keys


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def layers() -> Layers:
    return Layers(load_operators("cpu"), load_kernel("cpu"))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    """A patched model of each family."""
    return patch_model(small_model(request.param, seed=1))


@pytest.fixture
def qwen3() -> Any:
    """A fresh, unpatched model to break."""
    return small_model("qwen3", seed=2)


def sequences(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 512, (n,), generator=draw).tolist() for n in lengths]


def responded(logits: list[Tensor], prompts: list[list[int]]) -> list[Tensor]:
    """Of whole sequences the rows that predict the response and what follows it."""
    return [rows[len(prompt) - 1 :] for rows, prompt in zip(logits, prompts, strict=True)]


# ------------------------------------------------------------------------------------------------------- the constraint
@torch.no_grad()
def test_full_and_token_wise_logits_are_equal(model: Any) -> None:
    """Every position's logits: whole sequences alone and in one batch, against prefill and decode alone and in one batch."""
    prompts, responses = sequences(PROMPTS, 3), sequences(RESPONSES, 4)
    whole = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    together = full_logits(model, whole)
    assert equal_bits([full_logits(model, [s])[0] for s in whole], together)
    assert equal_bits(full_logits(model, whole[::-1])[::-1], together)
    expected = responded(together, prompts)
    assert equal_bits(replay_logits(model, prompts, responses), expected)
    assert equal_bits([replay_logits(model, [p], [r])[0] for p, r in zip(prompts, responses, strict=True)], expected)
    prefilled = full_logits(model, prompts)  # the prompts' own rows do not know of a response
    assert equal_bits(prefilled, [rows[: len(p)] for rows, p in zip(together, prompts, strict=True)])
    assert equal_bits(replay(model, prompts, responses), score(model, prompts, responses))
    assert torch.cat(together).std() > 0.5  # logits that mean something


@torch.no_grad()
def test_the_comparison_sees_transformers_own_forward() -> None:
    """The same comparison fails for transformers' own operators, alone and in a batch."""
    from transformers import DynamicCache

    model = small_model("qwen3", seed=1)
    prompts, responses = sequences(PROMPTS, 3), sequences(RESPONSES, 4)
    whole = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    together = full_logits(model, whole)
    assert not equal_bits([full_logits(model, [s])[0] for s in whole], together)
    cache = DynamicCache(config=model.config)
    rows = [model(input_ids=padded(prompts[3:4]), cache=cache, use_cache=True).logits[0, -1]]
    rows += [model(input_ids=torch.tensor([[t]]), cache=cache, use_cache=True).logits[0, -1] for t in responses[3]]
    assert not equal_bits([torch.stack(rows)], responded(together, prompts)[3:4])


@torch.no_grad()
def test_a_cache_may_be_used_again(model: Any) -> None:
    """What a cache held before changes nothing, also where one place is cleared and the others go on."""
    prompts, responses = sequences((40, 3, 70), 5), sequences((6, 6, 6), 6)
    fresh = replay_logits(model, prompts, responses)
    cache = KVCache(model, 3, 100)
    for layer in [*cache.k, *cache.v]:
        layer.fill_(float("nan"))
    replay_logits(model, sequences((80, 90, 2), 7), sequences((9, 9, 9), 8), cache)
    with pytest.raises(UserError, match="clear it first"):
        replay_logits(model, prompts, responses, cache)
    cache.clear()
    assert equal_bits(replay_logits(model, prompts, responses, cache), fresh)
    other, tokens = sequences((30,), 9)[0], responses[0][0]
    cache.clear([1])
    cache.expect([1, len(other), 1])  # a new prompt joins while the others decode
    ids = padded([[tokens], other, [tokens]])
    joined = model(input_ids=ids, cache=cache).logits
    whole = [[*prompts[0], *responses[0], tokens], other, [*prompts[2], *responses[2], tokens]]
    expected = full_logits(model, whole)
    assert equal_bits([joined[0, 0], joined[1, : len(other)], joined[2, 0]], [expected[0][-1], expected[1], expected[2][-1]])
    assert cache.lengths.tolist() == [47, 30, 77]


@torch.no_grad()
def test_chunks_and_threads_change_nothing(model: Any) -> None:
    """A prompt in chunks of any size, and one thread in place of two."""
    (tokens,) = sequences((90,), 11)
    (expected,) = full_logits(model, [tokens])
    for chunks in ([90], [64, 26], [1, 1, 30, 58], [33, 33, 24]):
        cache, rows = KVCache(model, 1, 90), []
        for start, end in zip(
            [sum(chunks[:i]) for i in range(len(chunks))], [sum(chunks[: i + 1]) for i in range(len(chunks))], strict=True
        ):
            rows.append(model(input_ids=padded([tokens[start:end]]), cache=cache).logits[0])
        assert equal_bits([torch.cat(rows)], [expected]), chunks
    torch.set_num_threads(1)
    assert equal_bits(full_logits(model, [tokens]), [expected])


@torch.no_grad()
def test_transformers_generate_has_the_same_tokens(model: Any) -> None:
    """Greedy decoding through transformers' own loop and its DynamicCache."""
    prompts = sequences((21, 21), 12)
    tokens, scores = generate(model, prompts, 8)
    theirs = model.generate(
        input_ids=padded(prompts),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert theirs.sequences[:, 21:].tolist() == tokens
    logits = torch.stack(theirs.logits, 1).to(torch.bfloat16)  # widened by its loop
    assert equal_bits(list(logits), [rows[:-1] for rows in replay_logits(model, prompts, tokens)])
    assert equal_bits(scores, score(model, prompts, tokens))


# ------------------------------------------------------------------------------------------------------------ the tracer
class Faulty(Layers):
    """Layers in which the call that `at` names flips the last bit of element 7 where it has one row a sequence."""

    def __init__(self, layers: Layers, operator: str, at: Callable[..., bool]) -> None:
        super().__init__(layers.operators, layers.kernel)
        right = getattr(self, operator)

        def wrong(*arguments: Any, **options: Any) -> Any:
            out = right(*arguments, **options)
            tensor = out[1] if isinstance(out, tuple) else out
            if at(*arguments) and tensor.numel() // tensor.shape[-1] <= 2:
                flat = words(tensor).view(-1)
                flat[7 % len(flat)] ^= 1
            return out

        setattr(self, operator, wrong)


def traced(model: Any) -> str | None:
    """The first difference between one pass and prefill with decode, of two sequences."""
    prompts, responses = sequences((9, 9), 13), sequences((4, 4), 14)
    with torch.no_grad():
        with recorded(model) as full:
            full_logits(model, [[*p, *r] for p, r in zip(prompts, responses, strict=True)])
        with recorded(model) as steps:
            replay_logits(model, prompts, responses)
    difference = first_difference(full, steps)
    return None if difference is None else str(difference)


@pytest.mark.parametrize(
    ("family", "operator", "module", "name"),
    [
        ("qwen3", "linear", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj linear"),
        ("qwen3", "rmsnorm", "model.layers.0.post_attention_layernorm", "model.layers.0.post_attention_layernorm rmsnorm"),
        ("qwen2", "swiglu", None, "model.layers.0.mlp swiglu"),
        ("mixtral", "combine", None, "model.layers.0.mlp.experts combine"),
        ("qwen3_moe", "linear", "lm_head", "lm_head linear"),
    ],
)
def test_the_tracer_names_the_operator(layers: Layers, family: str, operator: str, module: str | None, name: str) -> None:
    """A single flipped bit in decode, in one module: operator, sequence, position and element; without it nothing differs."""
    model = small_model(family, seed=3)
    weight = None if module is None else model.get_submodule(module).weight
    faulty = Faulty(layers, operator, lambda *given: weight is None or any(x is weight for x in given))
    assert traced(patch_model(model)) is None
    unpatch_model(model)
    found = traced(patch_model(model, layers=faulty))
    assert found is not None and found.startswith(f"{name}: sequence 0, position 9, element 7: 0x"), found


def test_the_tracer_names_a_wrong_cache_write(layers: Layers) -> None:
    """A word of the cache that is not the row's."""

    class Faulty(Operators):
        def cache_write(self, x: Tensor, cache: Tensor, sequence: Tensor, position: Tensor) -> None:
            super().cache_write(x, cache, sequence, position)
            if len(x) <= 2:
                words(cache)[sequence[-1], 0, position[-1], 3] ^= 1

    built = layers.operators.built
    assert built is not None
    faulty = Layers(Faulty(built.library, layers.operators.target), layers.kernel)
    found = traced(patch_model(small_model("qwen3", seed=3), layers=faulty))
    assert found is not None and found.startswith(
        "model.layers.0.self_attn cache write, k: sequence 1, position 9, element 3: "
    )


@torch.no_grad()
def test_traces_of_a_batch_and_of_one_sequence_compare(model: Any) -> None:
    """Sequence 1 of a batch is sequence 0 of its own; sequence 0 of the batch is not."""
    prompts = sequences((4, 6), 19)
    with recorded(model) as batch:
        full_logits(model, prompts)
    with recorded(model) as alone:
        full_logits(model, prompts[1:])
    assert first_difference(batch, alone, {1: 0}) is None
    assert first_difference(batch, alone, {0: 0}) is not None


def test_the_tracer_refuses_what_it_cannot_compare(model: Any, qwen3: Any) -> None:
    with pytest.raises(UserError, match="not patched"), recorded(qwen3):
        pass
    with torch.no_grad(), recorded(model) as one:
        full_logits(model, sequences((3,), 1))
    with torch.no_grad(), recorded(model) as none:
        pass
    with pytest.raises(UserError, match="other operators"):
        first_difference(one, none)


# -------------------------------------------------------------------------------------------------------------- training
def test_a_training_step(model: Any) -> None:
    """Gradients of every weight point where those of transformers' fp32 forward do; bits agree again after the step."""
    model = copy.deepcopy(model)
    prompts, responses = sequences((20, 33), 15), sequences((12, 7), 16)
    before = score(model, prompts, responses)
    assert all(x.requires_grad for x in before)
    torch.cat(before).mean().backward()
    exact = unpatch_model(copy.deepcopy(model)).float()
    for weight in exact.parameters():
        weight.grad = None
    whole = padded([[*p, *r] for p, r in zip(prompts, responses, strict=True)])
    logits = exact(input_ids=whole).logits.log_softmax(-1)
    rows = [
        logits[i, len(p) - 1 + j, t] for i, (p, r) in enumerate(zip(prompts, responses, strict=True)) for j, t in enumerate(r)
    ]
    torch.stack(rows).mean().backward()
    ours, theirs = ({n: p.grad for n, p in m.named_parameters()} for m in (model, exact))
    for name, gradient in theirs.items():
        assert ours[name] is not None, name
        likeness = torch.cosine_similarity(ours[name].float().flatten(), gradient.flatten(), 0)
        assert likeness > 0.95 or gradient.abs().max() < 1e-6, (name, float(likeness))
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 2.0 * weight.grad
    after = score(model, prompts, responses)
    assert not equal_bits(before, after)  # other weights
    assert equal_bits(replay(model, prompts, responses), after)
    assert torch.cat(after).mean() < torch.cat(before).mean()


def test_gradient_checkpointing_changes_nothing(qwen3: Any) -> None:
    """Layers that run again in the backward pass give the same gradients."""
    patch_model(qwen3).train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            qwen3.activation_checkpointing_enable()
        qwen3.zero_grad()
        qwen3(input_ids=IDS, labels=IDS).loss.backward()
        found.append([p.grad.clone() for p in qwen3.parameters()])
    assert equal_bits(*found) and all(bool(gradient.any()) for gradient in found[0])


# -------------------------------------------------------------------------------------------------------------- refusals
def changed(change: Callable[[Any], None], family: str = "qwen3", **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = small_model(family, **settings)
        change(model)
        return model

    return make


def set_attribute(path: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


class Adapter(nn.Linear):
    """A linear layer that computes something else besides."""


def another_architecture() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=32)).to(torch.bfloat16)


def as_int8(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(torch.zeros(layer.weight.shape, dtype=torch.int8), requires_grad=False)


class _Shard(torch.Tensor):
    """Stands for a weight that is spread over devices."""

    def to_local(self) -> Tensor:
        return self


def as_shard(model: Any) -> None:
    layer = model.model.layers[0].self_attn.q_proj
    layer._parameters["weight"] = nn.Parameter(layer.weight.detach().as_subclass(_Shard), requires_grad=False)


REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("architecture", another_architecture, "the model: LlamaForCausalLM is not supported"),
    ("base model", lambda: small_model("qwen3").model, "the model: Qwen3Model is not supported"),
    ("no model", lambda: nn.Linear(16, 16), "the model: Linear is not supported"),
    ("dtype", changed(lambda m: m.to(torch.float16)), "model.embed_tokens: weight is torch.float16, not torch.bfloat16"),
    ("one layer's dtype", changed(lambda m: m.model.layers[1].mlp.to(torch.float32)), "model.layers.1.mlp.gate_proj: weight is torch.float32"),
    ("head dimension", changed(lambda m: None, head_dim=64), "model.layers.0.self_attn: head dimension 64 is not 128"),
    ("quantised weights", changed(as_int8), "model.layers.1.mlp.up_proj: weight is torch.int8: quantised"),
    ("quantised model", changed(lambda m: setattr(m.config, "quantization_config", {"bits": 4})), "the model: Qwen3ForCausalLM is quantised"),
    ("tensor parallelism", changed(lambda m: setattr(m, "_tp_size", 2)), "the model: Qwen3ForCausalLM is split over 2 devices"),
    ("a sharded weight", changed(as_shard), "model.layers.0.self_attn.q_proj: weight is a .*tensor parallelism"),
    ("sliding window", changed(lambda m: None, "mixtral", sliding_window=64), "model.layers.0.self_attn: a sliding window of 64 tokens"),
    ("one sliding layer", changed(lambda m: None, use_sliding_window=True, sliding_window=64, max_window_layers=1), "a sliding window of 64"),
    ("dropout", changed(lambda m: None, attention_dropout=0.1), "model.layers.0.self_attn: dropout of 0.1"),
    ("activation", changed(lambda m: None, hidden_act="gelu"), "model.layers.0.mlp.act_fn: activation GELUActivation is not silu"),
    ("rope", changed(lambda m: None, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}), "model.rotary_emb: rope of type 'linear'"),
    ("width", changed(lambda m: None, hidden_size=264), "model.layers.0.self_attn.q_proj: 264 inputs are no multiple of 16"),
    ("heads", changed(lambda m: None, num_attention_heads=34), "34 query heads to 2 KV heads"),
    ("an adapter", changed(set_attribute("model.layers.0.mlp", "up_proj", Adapter(256, 384).to(torch.bfloat16))), "model.layers.0.mlp.up_proj: no operator for a .*Adapter"),
    ("router noise", changed(lambda m: None, "mixtral", router_jitter_noise=0.1), "model.layers.0.mlp: router noise of 0.1"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_is_not_supported_is_refused_by_name(make: Callable[[], Any], message: str) -> None:
    """One line, and the model is left as it was."""
    model = make()
    with pytest.raises(UserError, match=message) as error:
        patch_model(model)
    assert "\n" not in str(error.value)
    assert not any("forward" in m.__dict__ or hasattr(m, "_aligned") for m in model.modules())


def test_a_window_that_is_off_is_none() -> None:
    patch_model(small_model("qwen3", sliding_window=64))  # use_sliding_window is false


def test_another_version_of_transformers_is_refused(qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(UserError, match=r"transformers 4\.57\.1 is not 5\.24\.x"):
        patch_model(qwen3)


def exchanged(model: Any) -> None:
    model.model.layers[1].mlp = small_model("qwen3").model.layers[1].mlp


def appended(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_module("extra", nn.Linear(16, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (exchanged, "model.layers.1.mlp: a Qwen3MLP that is not patched"),
        (
            lambda m: m.model.layers[0].self_attn.q_norm.__dict__.pop("forward"),
            "model.layers.0.self_attn.q_norm: a Qwen3RMSNorm",
        ),
        (appended, "model.layers.0.mlp.up_proj.extra: a Linear that is not patched"),
        (lambda m: delattr(m.model.layers[1], "mlp"), "model.layers.1.mlp: is gone"),
        (lambda m: m.set_attn_implementation("sdpa"), f"model.layers.0.self_attn: attention runs as 'sdpa', not '{ATTENTION}'"),
        (lambda m: m.model.layers[1].mlp.to(torch.float32), "model.layers.1.mlp.gate_proj: weight is torch.float32"),
    ],
)
def test_a_layer_that_is_not_patched_stops_the_forward(qwen3: Any, change: Callable[[Any], Any], message: str) -> None:
    ids = torch.tensor([[1, 2, 3]])
    patch_model(qwen3)(input_ids=ids)
    change(qwen3)
    with pytest.raises(UserError, match=message):
        qwen3(input_ids=ids)


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}, "pad on the right"),
        ({"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, "pad on the right"),
        ({"attention_mask": torch.zeros(2, 1, 3, 3)}, "attention_mask has shape"),
        ({"position_ids": torch.tensor([[0, 1, 0]])}, "packed sequences are not supported"),
        ({"cache": object()}, "cache is a object"),
        ({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]), "cache": "static"}, "hides tokens beside a cache"),
    ],
)
def test_calls_that_would_not_agree_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    if options.get("cache") == "static":
        options = {**options, "cache": KVCache(model, 2, 8)}
    with pytest.raises(UserError, match=message), torch.no_grad():
        model(input_ids=IDS, **options)


def test_a_cache_that_does_not_fit_is_refused(model: Any) -> None:
    for cache, message in ((KVCache(model, 1, 8), "2 sequences, the cache 1"), (KVCache(model, 2, 2), "capacity of 2")):
        with pytest.raises(UserError, match=message), torch.no_grad():
            model(input_ids=IDS, cache=cache)
    cache = KVCache(model, 2, 8)
    with pytest.raises(UserError, match="at least 1"):
        cache.expect([1, 0])
    cache.expect([1, 4])
    with pytest.raises(UserError, match="do not fit"), torch.no_grad():
        model(input_ids=IDS, cache=cache)
    with torch.no_grad():
        model(input_ids=IDS, cache=cache)
    with pytest.raises(UserError, match="requires grad"):  # behind other rows there is no backward pass
        model(input_ids=IDS, cache=cache)


# ------------------------------------------------------------------------------------------------------------- the patch
@torch.no_grad()
def test_copies_and_the_way_back(qwen3: Any) -> None:
    """A copied model is patched for itself; an unpatched one has transformers' bits again."""
    standard = qwen3(input_ids=IDS).logits
    patched = patch_model(qwen3)(input_ids=IDS).logits
    twin = copy.deepcopy(qwen3)
    assert aligned_of(twin) is not aligned_of(qwen3) and aligned_of(twin.model).root is twin
    twin.lm_head.weight.mul_(2)
    assert equal_bits([qwen3(input_ids=IDS).logits], [patched]) and equal_bits([twin(input_ids=IDS).logits], [patched * 2])
    patch_model(qwen3)  # once more changes nothing, and is undone with the first
    assert equal_bits([qwen3(input_ids=IDS).logits], [patched])
    assert equal_bits([unpatch_model(qwen3)(input_ids=IDS).logits], [standard])
    assert equal_bits([twin(input_ids=IDS).logits], [patched * 2])
    with pytest.raises(UserError, match="not patched"):
        unpatch_model(qwen3)


@torch.no_grad()
def test_logits_are_as_accurate_as_transformers(model: Any) -> None:
    """Distance from the same model in fp64, in the mean over positions; a forward with one wrong weight is much farther."""
    ids = padded(sequences((40, 40), 17))
    plain = unpatch_model(copy.deepcopy(model))
    exact = copy.deepcopy(plain).double()
    if hasattr(exact.model.layers[0].mlp, "experts"):
        exact.set_experts_implementation("eager")
    reference = exact(input_ids=ids).logits

    def distance(logits: Tensor) -> float:
        return float((logits.double() - reference).square().mean(-1).sqrt().median())

    ours, theirs = distance(model(input_ids=ids).logits), distance(plain(input_ids=ids).logits)
    assert ours <= 1.2 * theirs
    wrong = copy.deepcopy(model)
    wrong.model.layers[0].self_attn.o_proj.weight.mul_(1.1)
    assert distance(wrong(input_ids=ids).logits) > 1.2 * theirs


def test_small_models_have_the_heads_of_published_ones() -> None:
    published = {"qwen2": 12 / 2, "qwen3": 32 / 8, "qwen3_moe": 32 / 4, "mixtral": 32 / 8}  # query heads a KV head
    for family, ratio in published.items():
        config = families.small_config(family)
        assert config.num_attention_heads / config.num_key_value_heads == ratio
    with pytest.raises(UserError, match="unknown family"):
        families.small_config("gpt2")


# -------------------------------------------------------------------------------------------------- reuse, and the command
@pytest.fixture(scope="module")
def rolled() -> tuple[Any, Rollout]:
    model = patch_model(small_model("qwen3_moe", seed=4))
    prompts = sequences((4, 11, 30), 18)
    responses, scores = generate(model, prompts, 6, draw=torch.Generator().manual_seed(1))
    return model, record(model, prompts, responses, scores, weights="step 3")


def test_reused_scores_are_the_trainers(rolled: tuple[Any, Rollout]) -> None:
    model, rollout_ = rolled
    audit = AuditedReuse(model, tokens=5, seed=1)
    old = audit.take(rollout_, weights="step 3")
    new = score(model, rollout_.prompts, rollout_.responses)
    assert equal_bits(old, new) and audit.audited == 5
    assert all(bool(((n - o).exp() == 1).all()) for n, o in zip(new, old, strict=True))


def test_the_first_unequal_bit_raises(rolled: tuple[Any, Rollout]) -> None:
    """One bit of one of 18 values: found where all are computed again, and in some draws where a part is."""
    model, rollout_ = rolled
    tampered = copy.deepcopy(rollout_)
    words(tampered.scores[1])[4] ^= 1
    with pytest.raises(BitMismatch, match="sequence 1, response token 4: the rollout has log-probability"):
        AuditedReuse(model, tokens=100).take(tampered, weights="step 3")
    caught = 0
    for seed in range(8):
        with contextlib.suppress(BitMismatch):
            AuditedReuse(model, tokens=6, seed=seed).take(tampered, weights="step 3")
            caught -= 1
        caught += 1
    assert 0 < caught < 8


def test_other_weights_and_contracts_are_refused(rolled: tuple[Any, Rollout]) -> None:
    model, rollout_ = rolled
    with pytest.raises(UserError, match="weights 'step 3', the trainer has 'step 4'"):
        AuditedReuse(model).take(rollout_, weights="step 4")
    other = Rollout(rollout_.prompts, rollout_.responses, rollout_.scores, "0" * 64, "step 3")
    with pytest.raises(UserError, match="of contract 000000000000"):
        AuditedReuse(model).take(other, weights="step 3")
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.model.norm.weight.mul_(1.01)
    assert weights_digest(moved) != weights_digest(model) == weights_digest(copy.deepcopy(model))
    with pytest.raises(BitMismatch):
        AuditedReuse(moved).take(rollout_, weights="step 3")
    with pytest.raises(UserError, match=r"scores of sequence 0"):
        record(model, rollout_.prompts, rollout_.responses, [s[:-1] for s in rollout_.scores], weights="step 3")


def test_demo_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sequences", "2", "--prompt", "8", "--response", "16", "--layers", "1", "--repeats", "1"]
    assert demo([*sizes, "--family", "qwen2"]) == 0
    lines = {line[:40].strip(): line[40:].split() for line in capsys.readouterr().out.splitlines()[1:]}
    equal = lines["of equal bits, decode and trainer"]
    assert equal[:3] == ["32", "(100.0", "%)"] and int(equal[3]) < 32
    assert lines["ratio, largest"][0] == lines["ratio, smallest"][0] == "1.000000" != lines["ratio, largest"][1]
    with pytest.raises(UserError, match="target h200 has an attention kernel only"):
        demo(["--gpu", "h200"])
    with pytest.raises(UserError, match="--repeats 0 is less than 1"):
        demo(["--repeats", "0"])


def test_batches_without_tokens_are_refused() -> None:
    for empty in ([], [[]], [[1], []]):
        with pytest.raises(UserError, match="at least one"):
            rollout.padded(empty)


def test_patched_classes_are_those_of_the_installed_transformers(model: Any) -> None:
    """Every module that computes has a forward of ours, and every kind of forward is used by some family."""
    used = {forwards.installed(m) for m in model.modules()} - {None}
    assert {
        forwards._base,
        forwards._layer,
        forwards._attention,
        forwards._linear,
        forwards._embedding,
        forwards._norm,
        forwards._angles,
    } <= used
    assert ({forwards._mlp} <= used) != ({forwards._moe, forwards._router, forwards._experts} <= used)
