"""The compiled FlashAttention kernels on a GPU; without one, `gpu-check --allow-cpu` runs them in the interpreter."""

from dataclasses import dataclass

import pytest
import torch

from labkit.attention import register
from labkit.kernels import choose_backend, flash_attention
from labkit.measure import peak_memory
from labkit.models import tiny_model

pytestmark = pytest.mark.gpu
pytest.importorskip("labkit.kernels.flash_attention.triton")


@dataclass(frozen=True)
class Case:
    """On a GPU. A CPU's interpreter gets one KV head, and lengths of a thirtieth."""

    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool
    padding: str = ""
    dtype: torch.dtype = torch.bfloat16


# Each is compiled, forward and backward: few, since a section has 45 s.
CASES = [
    Case(8, 8, 1024, 1024, 128, True),
    Case(8, 2, 1024, 1024, 128, False, "lengths"),
    Case(6, 2, 800, 1600, 64, True, "left", torch.float16),
    Case(4, 1, 641, 641, 80, True, "holes"),
    Case(2, 1, 640, 640, 256, True),
]


def made(case: Case, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """q, k, v and the gradient of the output, in the dtype that the device multiplies rightly; the padding mask."""
    heads, kv_heads, q_len, kv_len, dtype = case.heads, case.kv_heads, case.q_len, case.kv_len, case.dtype
    if device.type != "cuda":
        heads, kv_heads, q_len, kv_len, dtype = heads // kv_heads, 1, q_len // 30, kv_len // 30, torch.float16
    sizes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (heads, q_len))
    tensors = [torch.randn(2, *size, case.head_dim, device=device).to(dtype) for size in sizes]
    if heads > kv_heads:  # laid out as a model's projections give them: heads beside each other
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    mask = torch.ones(2, kv_len, dtype=torch.bool, device=device) if case.padding else None
    if case.padding == "left":
        mask[0, : kv_len // 3], mask[1, : kv_len - 5] = False, False
    elif case.padding == "lengths":
        mask[0, kv_len // 2 :], mask[1, kv_len - 5 :] = False, False
    elif case.padding == "holes":
        mask[0, ::3], mask[1, kv_len // 4 : kv_len // 2] = False, False
        mask[0, -1] = False
    return tensors, mask


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None) -> torch.Tensor:
    """The definition in the dtype of its arguments, softmax in float32 at least; nothing seen gives zeros."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    place = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    sees = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    sees = sees & (torch.arange(k.shape[2], device=q.device) <= place) if causal else sees
    sees = sees if mask is None else sees & mask[:, None, None]
    scores = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5
    scores = scores.masked_fill(~sees, torch.finfo(q.dtype).min)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return weights.masked_fill(~sees, 0.0) @ v


def with_gradients(attend, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output, dQ, dK, dV."""
    inputs = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, tensors[3].to(out.dtype))]


def ours(case: Case, mask: torch.Tensor | None):
    padding = {"seqlens_k": mask.sum(1).int()} if case.padding == "lengths" else {"padding_mask": mask}
    return lambda q, k, v: flash_attention(q, k, v, causal=case.causal, backend="triton", **padding)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients_err_at_most_twice_as_much_as_pytorch(case: Case, device: torch.device) -> None:
    tensors, mask = made(case, device)
    exact = with_gradients(lambda q, k, v: formula(q, k, v, case.causal, mask), [x.double() for x in tensors])
    plain = with_gradients(lambda q, k, v: formula(q, k, v, case.causal, mask), tensors)
    found = with_gradients(ours(case, mask), tensors)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), found, plain, exact, strict=True):
        assert a.isfinite().all() and a.dtype is b.dtype, name
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm(), name
    if mask is not None:  # a query before every key that is no padding
        blind = ~mask.cumsum(1).bool()[:, -tensors[0].shape[2] :]
        assert blind.any() or case.padding != "left"
        assert found[0].transpose(1, 2)[blind].eq(0).all() and found[1].transpose(1, 2)[blind].eq(0).all()


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_the_same_bits_every_time(case: Case, device: torch.device) -> None:
    if device.type != "cuda" and case is CASES[0]:
        pytest.skip("one case tests this test")
    tensors, mask = made(case, device)
    first = with_gradients(ours(case, mask), tensors)
    for _ in range(20 if device.type == "cuda" else 1):
        assert all(torch.equal(*pair) for pair in zip(with_gradients(ours(case, mask), tensors), first, strict=True))


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_a_cuda_graph_replays_the_forward_pass(case: Case, device: torch.device) -> None:
    """Where descriptors are, a graph keeps them; and what is padding may change."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    (q, k, v, _), mask = made(case, device)

    def attend() -> torch.Tensor:
        return flash_attention(q, k, v, causal=True, padding_mask=mask)

    attend()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for columns in (100, 0, 700):
        q.normal_()
        k.normal_()
        if mask is not None:
            mask.fill_(True)
            mask[1, :columns] = False
        graph.replay()
        assert torch.equal(out, attend())


def test_auto_takes_the_kernel(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("on a CPU the interpreter runs only by name")
    (q, k, v, _), _ = made(CASES[0], device)
    assert choose_backend("flash_attention", q, k, v).name == "triton"
    assert torch.equal(flash_attention(q, k, v, causal=True), flash_attention(q, k, v, causal=True, backend="triton"))


def test_a_model_with_it_errs_no_more_than_eager(device: torch.device) -> None:
    """A left-padded batch: the prompt, then steps over the cache."""
    register()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = tiny_model(head_dim=64, max_position_embeddings=512).to(device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, model.config.vocab_size, (3, 70), generator=generator).to(device)
    mask = torch.ones_like(ids)
    mask[1, :20], mask[2, :61] = 0, 0

    def logits(kind: str, dtype: torch.dtype) -> torch.Tensor:
        model.to(dtype).set_attn_implementation(kind)
        asked = {"input_ids": ids[:, :66], "attention_mask": mask[:, :66], "use_cache": True}
        with torch.no_grad():
            first = model(**asked)
            rows = [first.logits[:, -1:]]
            for at in range(66, 70):
                step = {"input_ids": ids[:, at : at + 1], "attention_mask": mask[:, : at + 1]}
                rows.append(model(**step, past_key_values=first.past_key_values).logits)
        return torch.cat(rows, 1).double()

    # Low precision first: what it rounds away of the weights is away for all. sdpa, since eager masks by float32's
    # range, which is none in float64.
    found, plain = (logits(kind, dtype) for kind in ("labkit_flash", "eager"))
    exact = logits("sdpa", torch.float64)
    assert found.isfinite().all()
    assert (found - exact).norm() <= 2 * (plain - exact).norm() + 1e-6 * exact.norm()


def test_a_model_trains_with_it_as_with_eager(device: torch.device) -> None:
    """Gradients of every weight over a left-padded batch; the GPU's kernel is what "auto" takes there."""
    register()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = tiny_model(head_dim=64, max_position_embeddings=512).to(device).requires_grad_(True)
    ids = torch.randint(1, model.config.vocab_size, (3, 70), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :20], mask[2, :61] = 0, 0

    def gradients(kind: str, dtype: torch.dtype) -> torch.Tensor:
        model.to(dtype).set_attn_implementation(kind)
        model.zero_grad()
        labels = ids.masked_fill(mask == 0, -100)
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        return torch.cat([p.grad.flatten().double() for p in model.parameters()])

    found, plain = (gradients(kind, dtype) for kind in ("labkit_flash", "eager"))
    exact = gradients("sdpa", torch.float64)
    assert found.isfinite().all()
    assert (found - exact).norm() <= 2 * (plain - exact).norm() + 1e-6 * exact.norm()


def test_extra_memory_grows_with_the_length(device: torch.device) -> None:
    """Four doublings; beside the output, as the allocator counts, forward and backward."""
    if device.type != "cuda":
        pytest.skip("the interpreter copies its arguments")
    extra: dict[str, list[int]] = {"forward": [], "backward": []}
    for length in (1024, 2048, 4096, 8192, 16384):
        q, k, v = (torch.randn(1, n, length, 128, dtype=torch.bfloat16, device=device) for n in (8, 2, 2))
        forward = lambda q=q, k=k, v=v: flash_attention(q, k, v, causal=True, backend="triton")  # noqa: E731
        forward()
        extra["forward"].append(peak_memory(forward, device=device) - q.nbytes)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        backward = lambda f=forward, i=inputs: torch.autograd.grad(f(), i, torch.ones_like(i[0]))  # noqa: E731
        backward()
        extra["backward"].append(peak_memory(backward, device=device))
    for name, sizes in extra.items():
        assert all(b <= 2.1 * max(a, 1 << 16) for a, b in zip(sizes, sizes[1:], strict=False)), (name, sizes)
    assert extra["forward"][-1] < 16384 * 16384
