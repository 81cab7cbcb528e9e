"""LAMB for large batches: timm's arithmetic, with the step and the rate in tensors.

timm's own class keeps the step as a number, which XLA compiles into the graph if a correction
rounds to 1 (step 158 for beta1 = 0.9). timm's function for the arithmetic also accepts tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trnslurm.train.errors import TrainError


class Lamb(torch.optim.Optimizer):
    """LAMB with the trust ratio clipped at 1, as AWS's sample uses it.

    It does not clip by the global norm.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float | Tensor,
        *,
        betas: tuple[float, float],
        eps: float,
        foreach: bool = False,
    ) -> None:
        self._update = _import_timm()
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter; all of them must have gradients."""
        for group in self.param_groups:
            parameters = group["params"]
            states = [self._state(parameter) for parameter in parameters]
            for state in states:
                state["step"] += 1
            if not parameters:
                continue
            beta1, beta2 = group["betas"]
            step = states[0]["step"]
            self._update(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                foreach=group["foreach"],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                beta3=1 - beta1,
                bias_correction1=1 - beta1**step,
                bias_correction2=1 - beta2**step,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled_decay=False,
                max_lr=None,
                trust_clip=True,
                always_adapt=False,
                caution=False,
            )

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _import_timm() -> Callable[..., None]:
    try:
        from timm.optim.lamb import lamb
    except ImportError as error:
        raise TrainError(
            f"train.optimizer: lamb needs the package timm on every node ({error}): "
            "run pip install '.[lamb]' in a clone of trnslurm"
        ) from None
    update: Callable[..., None] = lamb
    return update
