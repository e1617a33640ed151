"""What a model does to its logits after the projection, read from its Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.training.errors import ModelError

# Families whose logits are multiplied by logit_scale, or divided by logits_scaling, and in no other way changed. Others
# use the same names otherwise (HyperCLOVA X multiplies by logits_scaling): they are refused until they are looked at.
MULTIPLIED = ("cohere", "cohere2")
DIVIDED = ("granite",)


@dataclass(frozen=True)
class LogitRule:
    """``logits = scale * c(hidden @ weight.T + bias)`` with ``c(u) = softcap tanh(u / softcap)``, or u without one."""

    softcap: float | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """Raises :class:`ModelError` if the model scales its logits in a way that is not known here."""
        text = config.get_text_config()
        family, scale = text.model_type, 1.0
        for name, known in (("logit_scale", MULTIPLIED), ("logits_scaling", DIVIDED)):
            value = getattr(text, name, None)
            if value in (None, 1.0):
                continue
            if family not in known or value <= 0:
                raise ModelError(f"{family} sets {name}={value}, and how it applies it is not known here")
            scale = value if name == "logit_scale" else 1.0 / value
        softcap = getattr(text, "final_logit_softcapping", None)
        return cls(None if softcap is None else float(softcap), float(scale))

    def temperature(self, sampling: float) -> float:
        """The temperature that stands for ``sampling`` and the scale together: the engine divides scaled logits."""
        return sampling / self.scale
