"""A backward pass that has no derivative of its own, and says so instead of leaving it out."""

import functools
from collections.abc import Callable

import torch


class _Gradient(torch.autograd.Function):
    """A gradient as it is, whose derivative is refused."""

    @staticmethod
    def forward(ctx, gradient, *depends_on):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "flash_attention is differentiable once: its gradients have no derivative; those of backend='reference' do"
        )


def differentiable_once(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """For the `backward` of an autograd function that saved its differentiable inputs first.

    PyTorch's `once_differentiable` tells only of the gradient that comes in: one asked for with `create_graph=True`
    comes back as a constant, and a penalty on it would be lost without a word. Autocast is off, as in the forward pass.
    """

    @functools.wraps(backward)
    def once(ctx: object, dout: torch.Tensor) -> tuple:
        with torch.no_grad(), torch.autocast(dout.device.type, enabled=False):
            grads = backward(ctx, dout)
        if not torch.is_grad_enabled():
            return grads
        inputs = (dout, *ctx.saved_tensors[:3])
        return tuple(None if grad is None else _Gradient.apply(grad, *inputs) for grad in grads)

    return once
