"""The operators between attention calls: bits of the witness, rows that depend on themselves alone, accuracy, gradients."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tools.aligned.gradients import Layers
from tools.aligned.operators import Operators, load_operators, operators_config
from tools.aligned.trace import words
from tools.core.config import load_target
from tools.core.errors import KernelError, UserError
from tools.load_kernel import load_kernel

Tensor = torch.Tensor
BF16 = torch.bfloat16
KERNELS = Path(__file__).resolve().parents[1] / "experimental" / "cpu" / "kernels"
FREQUENCIES = torch.tensor([1e6 ** (-i / 64) for i in range(64)])
# One change a line: what the source says, what it says instead. Every operator that computes has one.
PERTURBED = {
    "add": ("to_bf16(load_float(a) + load_float(b))", "to_bf16(load_float(a) + load_float(b)) & 0xfffe"),
    "linear": ("const float sum = tree(acc[r][c]);", "const float sum = tree(acc[r][c]) * (R == 1 ? 1.001f : 1.0f);"),
    "rmsnorm": ("load_float(weight + i) * load_float(inner)", "load_float(weight + i) * (load_float(x + i) * splat(scale))"),
    "angles": ("for (int i = 1; i < 8; i++) c =", "for (int i = 1; i < 8; i += 1 + (i == 4)) c ="),
    "rope": ("fma(low, c, -(high * s))", "fma(-high, s, low * c)"),
    "swiglu": ("g / (splat(1.0f) + exp(-g)) * load_float(up)", "g / (splat(1.00001f) + exp(-g)) * load_float(up)"),
    "route": ("p[e] > p[best]", "p[e] >= p[best]"),
    "combine": ("int64_t s = 0; s < top; s++) acc = fma", "int64_t s = top - 1; s >= 0; s--) acc = fma"),
    "log_prob": ("(float)((double)shifted - ln(", "(float)((double)shifted - (float)ln("),
}


@pytest.fixture(scope="module")
def operators() -> Operators:
    return load_operators("cpu")


@pytest.fixture(scope="module")
def witness() -> Operators:
    return load_operators("cpu", role="witness")


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> Operators:
    """The kernel with a fault in every operator."""
    folder = tmp_path_factory.mktemp("perturbed")
    text = (KERNELS / "operators.cpp").read_text()
    for before, after in PERTURBED.values():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "operators.cpp").write_text(text)
    return compiled(folder / "operators.cpp", folder, "-O2", "-march=native")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def compiled(source: Path, folder: Path, *flags: str) -> Operators:
    compiler = shutil.which("c++")
    assert compiler
    command = [compiler, "-std=c++17", "-ffp-contract=off", "-pthread", "-fPIC", "-shared", f"-I{KERNELS}", *flags]
    subprocess.run([*command, str(source), "-o", str(folder / "library.so")], check=True)
    return Operators(folder / "library.so", load_target("cpu", operators_config("cpu")))


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def integers(end: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, end, shape, generator=torch.Generator().manual_seed(seed))


# Name -> rows -> outputs of an operator for those of 41 rows. The first is the whole, others are parts of it.
ROWS = 41
Outputs = tuple[Tensor, ...]


def table(run: Operators) -> dict[str, Callable[[Tensor], Outputs]]:
    x, tied = drawn(ROWS, 208, seed=1), (drawn(ROWS, 52, seed=2) * 2).round()
    heads, products = drawn(ROWS, 5, 128, seed=3), drawn(ROWS, 8, 800, seed=4)
    weights = torch.rand(ROWS, 8, generator=torch.Generator().manual_seed(5))
    positions, tokens = integers(2**24, ROWS, seed=6), integers(1003, ROWS, seed=7)
    gate, up = drawn(ROWS, 1600, seed=8, scale=10.0), drawn(ROWS, 1600, seed=13)
    logits = drawn(ROWS, 1003, seed=9, scale=6.0)
    cosines, sines = run.angles(positions, FREQUENCIES)
    weight, bias, gain = drawn(75, 208, seed=10), drawn(75, seed=11), drawn(208, seed=12)
    return {
        "embedding": lambda i: (run.embedding(logits.T.contiguous(), tokens[i]),),
        "add": lambda i: (run.add(gate[i], up[i]),),
        "linear": lambda i: (run.linear(x[i], weight), run.linear(x[i], weight, bias)),
        "rmsnorm": lambda i: (run.rmsnorm(x[i], gain, 1e-6), run.rmsnorm(heads[i], gain[:128], 1e-5)),
        "angles": lambda i: run.angles(positions[i], FREQUENCIES),
        "rope": lambda i: (run.rope(heads[i], cosines[i], sines[i]),),
        "swiglu": lambda i: (run.swiglu(gate[i], up[i]),),
        "route": lambda i: (*run.route(tied[i], 8, normalise=True), *run.route(logits[i, :60], 4, normalise=False)),
        "combine": lambda i: (run.combine(products[i], weights[i]),),
        "log_prob": lambda i: (run.log_prob(logits[i], tokens[i]),),
    }


def differing(left: Outputs, right: Outputs) -> int:
    """How many words differ."""
    return sum(int((words(a) != words(b)).sum()) for a, b in zip(left, right, strict=True))


def test_every_operator_is_the_witness(operators: Operators, witness: Operators, perturbed: Operators) -> None:
    """And a fault in an operator shows, in each of them."""
    every = torch.arange(ROWS)
    ours, theirs, wrong = (table(run) for run in (operators, witness, perturbed))
    for name in ours:
        assert differing(ours[name](every), theirs[name](every)) == 0, name
        if name in PERTURBED and name != "linear":  # its fault depends on the number of rows: below
            assert differing(wrong[name](every), theirs[name](every)) > 0, name
    assert set(ours) == {*PERTURBED, "embedding"}


def test_a_row_depends_on_itself_alone(operators: Operators, perturbed: Operators) -> None:
    """One row at a time, in parts of any size, in another order, with one thread: the words of all rows at once."""
    every = torch.arange(ROWS)
    ours = table(operators)
    parts = [every[i : i + 1] for i in range(ROWS)] + [every[3:5], every[:7], every[7:40], every.flip(0)]
    for name, run in ours.items():
        whole = run(every)
        for part in parts:
            assert differing(run(part), tuple(out[part] for out in whole)) == 0, (name, part)
        torch.set_num_threads(1)
        assert differing(run(every), whole) == 0, name
        torch.set_num_threads(2)
    wrong = table(perturbed)["linear"]
    assert differing(wrong(every[:1]), tuple(out[:1] for out in wrong(every))) > 0


def builds() -> list[list[str]]:
    """Flags of every vector width that this machine runs: four lanes everywhere, then eight and sixteen."""
    known = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    wide = {"avx2": ["-O2", "-mavx2", "-mfma"], "avx512f": ["-O2", "-mavx512f", "-mfma"]}
    return [["-O1"], *(flags for name, flags in wide.items() if name in known)]


@pytest.mark.parametrize("flags", builds(), ids=" ".join)
def test_vector_width_changes_no_bit(operators: Operators, tmp_path: Path, flags: list[str]) -> None:
    """Other optimizer levels too; without the second flag no fused instruction on x86-64."""
    other, every = table(compiled(KERNELS / "operators.cpp", tmp_path, *flags)), torch.arange(ROWS)
    for name, run in table(operators).items():
        assert differing(other[name](every), run(every)) == 0, name


def test_large_products_use_threads_and_blocks(operators: Operators, witness: Operators) -> None:
    """Rows and columns that fill several blocks, and others that do not."""
    for rows, inputs, outputs in [(1, 512, 333), (2, 16, 1), (13, 48, 31), (50, 256, 97), (24, 64, 64)]:
        x, weight = drawn(rows, inputs, seed=rows), drawn(outputs, inputs, seed=outputs)
        assert differing((operators.linear(x, weight),), (witness.linear(x, weight),)) == 0


# ------------------------------------------------------------------------------------------------------------- accuracy
def references() -> dict[str, Callable[[Operators], tuple[Tensor, Tensor]]]:
    """Name -> (what the operator gives, the same in fp64)."""
    x, y, w, b = drawn(9, 320, seed=1), drawn(9, 320, seed=2), drawn(70, 320, seed=3), drawn(70, seed=4)
    heads, positions, tokens = drawn(9, 2, 128, seed=5), integers(5000, 9, seed=6), integers(500, 9, seed=7)
    logits, router = drawn(9, 500, seed=8, scale=4.0), drawn(9, 64, seed=9, scale=3.0)
    products, weights = drawn(9, 3, 64, seed=10), torch.rand(9, 3, generator=torch.Generator().manual_seed(11))
    angle = (positions[:, None].float() * FREQUENCIES).double()
    low, high, c, s = heads[..., :64].double(), heads[..., 64:].double(), angle.cos()[:, None], angle.sin()[:, None]
    top = router.double().softmax(-1).topk(4).values
    return {
        "add": lambda run: (run.add(x, y), x.double() + y.double()),
        "linear": lambda run: (run.linear(x, w, b), functional.linear(x.double(), w.double(), b.double())),
        "rmsnorm": lambda run: (
            run.rmsnorm(x, w[0], 1e-6),
            x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[0].double(),
        ),
        "angles": lambda run: (torch.cat(run.angles(positions, FREQUENCIES)), torch.cat((angle.cos(), angle.sin()))),
        "rope": lambda run: (
            run.rope(heads, *run.angles(positions, FREQUENCIES)),
            torch.cat((low * c - high * s, high * c + low * s), -1),
        ),
        "swiglu": lambda run: (run.swiglu(x, y), functional.silu(x.double()) * y.double()),
        "route": lambda run: (run.route(router, 4, normalise=True)[1], top / top.sum(-1, keepdim=True)),
        "combine": lambda run: (run.combine(products, weights), (products.double() * weights.double()[..., None]).sum(-2)),
        "log_prob": lambda run: (
            run.log_prob(logits, tokens), logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0],
        ),
    }  # fmt: skip


def accurate(actual: Tensor, exact: Tensor, unit: float) -> bool:
    """Every element within two roundings of that unit, or of the largest element's two steps below."""
    limit = 2 * unit * exact.abs() + unit / 64 * exact.abs().max()
    return bool(((actual.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("name", references())
def test_accuracy(operators: Operators, name: str) -> None:
    """Against fp64; a result that is one percent off fails."""
    actual, exact = references()[name](operators)
    unit = 2.0**-8 if actual.dtype == BF16 else 2.0**-22
    assert accurate(actual, exact, unit)
    assert not accurate(actual.float() * 1.01, exact, unit)


def test_exponentials_at_their_ends(operators: Operators, witness: Operators) -> None:
    """Gates far beyond where exp overflows or vanishes give finite values, and those of the witness."""
    gate = torch.tensor([0.0, -0.0, 87.0, -87.0, 88.0, -88.5, 90.0, -90.0, 1e4, -1e4, 3e38, -3e38, 1e-38, -1e-40, 20.0, -20.0])
    gate, up = gate.to(BF16)[None], torch.full((1, 16), 0.5, dtype=BF16)
    out = operators.swiglu(gate, up)
    assert out.isfinite().all() and differing((out,), (witness.swiglu(gate, up),)) == 0
    assert accurate(out, functional.silu(gate.double()) * 0.5, 2.0**-8)


def test_equal_logits_go_to_the_lower_expert(operators: Operators) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.5, 2.0, -1.0], [0.0, -0.0, 0.0, -0.0, 0.0, 0.0]]).to(BF16)
    chosen, weights = operators.route(logits, 4, normalise=True)
    assert chosen.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert weights[1].tolist() == [0.25] * 4


def test_cache_write_leaves_every_other_word(operators: Operators) -> None:
    """The exact state after a write, in any order of rows; nothing where one place is out of range."""
    before = drawn(3, 2, 10, 128, seed=1)
    cache, x = before.clone(), drawn(4, 2, 128, seed=2)
    places = [(2, 9), (0, 0), (1, 5), (0, 3)]
    sequence, position = torch.tensor(places).T
    operators.cache_write(x, cache, sequence, position)
    expected = before.clone()
    for row, (s, p) in zip(x, places, strict=True):
        expected[s, :, p] = row
    assert torch.equal(words(cache), words(expected)) and not torch.equal(words(cache), words(before))
    for bad in (torch.tensor([2, 0, 3, 0]), torch.tensor([2, -1, 1, 0])):
        with pytest.raises(KernelError, match="out of range"):
            operators.cache_write(drawn(4, 2, 128, seed=3), cache, bad, position)
    assert torch.equal(words(cache), words(expected))


X, W = drawn(3, 32), drawn(5, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.linear(X.float(), W), "x is torch.float32, not torch.bfloat16"),
        (lambda run: run.linear(X, W.to("meta")), "weight is on meta"),
        (lambda run: run.linear(X[:, :24], W), r"shape \[24\] is not \[32\]"),
        (lambda run: run.linear(X[:, :24], W[:, :24]), "x has 24 columns, not a multiple of 16"),
        (lambda run: run.linear(X[:0], W), "no element"),
        (lambda run: run.linear(X, W, drawn(4)), r"bias: shape \[4\] is not \[5\]"),
        (lambda run: run.rmsnorm(X, W[0, :16], 1e-6), "weight"),
        (lambda run: run.embedding(W, torch.tensor([5])), "out of range"),
        (lambda run: run.embedding(W, torch.tensor([1.0])), "ids is torch.float32"),
        (lambda run: run.angles(torch.tensor([-1]), FREQUENCIES), "out of range"),
        (lambda run: run.route(X, 33, normalise=True), "top is 33"),
        (lambda run: run.log_prob(X, torch.tensor([0, 1, 32])), "out of range"),
        (lambda run: run.log_prob(X, torch.tensor([0])), "targets"),
        (
            lambda run: run.cache_write(drawn(1, 2, 128), drawn(1, 4, 2, 128).transpose(1, 2), *[torch.tensor([0])] * 2),
            "contiguous",
        ),
        (lambda run: run.add(X, [1.0]), "b is a list"),
    ],
)
def test_bad_input_is_one_line(operators: Operators, call: Callable[[Operators], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(operators)


def test_targets_without_operators(operators: Operators) -> None:
    with pytest.raises(UserError, match=r"target h200 has an attention kernel only.*they do for: cpu"):
        load_operators("h200")
    with pytest.raises(UserError, match="unknown target 'b300'"):
        load_operators("b300")
    assert len(operators.contract) == 64


# ------------------------------------------------------------------------------------------------------------ gradients
def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) / 128**0.5).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1) > 0, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def gradient_cases() -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]]:
    """Name -> (operator of Layers, the same in fp64, inputs)."""
    ids, positions, tokens = integers(40, 6, seed=1), integers(5000, 6, seed=2), integers(64, 6, seed=3)
    angle = (positions[:, None].float() * FREQUENCIES).double()
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    router = drawn(6, 16, seed=4)

    def turned(x: Tensor) -> Tensor:
        return torch.cat((x[..., :64] * c - x[..., 64:] * s, x[..., 64:] * c + x[..., :64] * s), -1)

    def chosen(logits: Tensor) -> Tensor:
        top = logits.softmax(-1).gather(-1, router.double().topk(4).indices)
        return top / top.sum(-1, keepdim=True)

    weights = torch.rand(6, 3, generator=torch.Generator().manual_seed(5))
    return {
        "embedding": (lambda run, t: run.embedding(t, ids), lambda t: t[ids], [drawn(40, 32)]),
        "add": (lambda run, a, b: run.add(a, b), torch.add, [drawn(6, 32), drawn(6, 32, seed=1)]),
        "rmsnorm": (
            lambda run, x, w: run.rmsnorm(x, w, 1e-6),
            lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w,
            [drawn(6, 64), drawn(64, seed=1)],
        ),
        "rope": (
            lambda run, x: run.rope(x, *run.operators.angles(positions, FREQUENCIES)), turned, [drawn(6, 2, 128)],
        ),
        "linear": (
            lambda run, x, w, b: run.linear(x, w, b), functional.linear, [drawn(6, 64), drawn(20, 64, seed=1), drawn(20)],
        ),
        "swiglu": (
            lambda run, g, u: run.swiglu(g, u), lambda g, u: functional.silu(g) * u, [drawn(6, 32), drawn(6, 32, seed=1)],
        ),
        "route": (lambda run, x: run.route(x, 4, normalise=True)[1], chosen, [router]),
        "combine": (
            lambda run, p, w: run.combine(p, w), lambda p, w: (p * w[..., None]).sum(-2), [drawn(6, 3, 32), weights],
        ),
        "log_prob": (
            lambda run, x: run.log_prob(x, tokens),
            lambda x: x.log_softmax(-1).gather(-1, tokens[:, None])[:, 0],
            [drawn(6, 64)],
        ),
        "prefill": (
            lambda run, q, k, v: run.prefill(q, k, v), causal, [drawn(2, 6, 70, 128), drawn(2, 2, 70, 128, seed=1), drawn(2, 2, 70, 128, seed=2)],
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def layers(operators: Operators) -> Layers:
    return Layers(operators, load_kernel("cpu"))


def near(actual: list[Tensor], exact: list[Tensor]) -> bool:
    """Each gradient within one percent of its own root mean square, in the mean over elements."""
    pairs = zip(actual, exact, strict=True)
    return all(float((a.double() - e).square().mean().sqrt()) <= 0.01 * float(e.square().mean().sqrt()) for a, e in pairs)


@pytest.mark.parametrize("name", gradient_cases())
def test_gradients(layers: Layers, name: str) -> None:
    """Against fp64; gradients two percent off fail. Without grad mode nothing is recorded, and the bits are the same."""
    run, reference, inputs = gradient_cases()[name]
    ours, exact = [x.clone().requires_grad_() for x in inputs], [x.double().requires_grad_() for x in inputs]
    out, expected = run(layers, *ours), reference(*exact)
    with torch.no_grad():
        assert differing((run(layers, *ours),), (out,)) == 0
    weight = drawn(*out.shape, seed=8)
    out.backward(weight.to(out.dtype))
    expected.backward(weight.double())
    found, wanted = ([x.grad for x in side if x.grad is not None] for side in (ours, exact))
    assert len(found) == len(inputs) and near(found, wanted)
    assert not near([x.float() * 1.02 for x in found], wanted)
