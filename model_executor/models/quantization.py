"""How quantized checkpoints store the weights of linear layers."""

from dataclasses import dataclass
from typing import Any

from dllm_engine.text import shortened

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Quantization:
    """Storage of the linear layers."""

    bits: int
    group_size: int | None = None
    """Number of weights that share a scale; None: all weights of an output feature; 0:
    there are no scales.
    """
    has_zero_points: bool = False

    @classmethod
    def of(cls, config: Any) -> "Quantization | None":
        """The quantization in a checkpoint's config; None for a plain checkpoint, and
        for unknown quantization.
        """
        stated = getattr(config, "quantization_config", None) or {}
        try:
            return cls._stated(stated)
        except (AttributeError, KeyError, TypeError):
            raise ValueError(
                f"config.json: quantization_config={shortened(stated)} cannot be read"
            ) from None

    @classmethod
    def _stated(cls, stated: dict[str, Any]) -> "Quantization | None":
        groups = list(stated.get("config_groups", {}).values())
        if stated.get("quant_method") in ("gptq", "awq"):
            size = stated.get("group_size", stated.get("q_group_size", -1))
            return cls(
                stated.get("bits", stated.get("w_bit", 4)),
                size if size > 0 else None,
                True,
            )
        if stated.get("quant_method") == "compressed-tensors" and len(groups) == 1:
            weights = groups[0]["weights"]
            if weights["num_bits"] in (4, 8):
                return cls(
                    weights["num_bits"],
                    weights.get("group_size"),
                    not weights.get("symmetric", True),
                )
        return None

    def matrix_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes of weights, scales (float32 for 8 bits, else half precision) and zero
        points of a linear layer.
        """
        groups = (
            1
            if self.group_size is None
            else -(-inputs // self.group_size)
            if self.group_size
            else 0
        )
        scales = outputs * groups
        zeros = scales * self.bits // 8 if self.has_zero_points else 0
        return (
            inputs * outputs * self.bits // 8
            + scales * (FLOAT32_BYTES if self.bits == 8 else 2)
            + zeros
        )


QUANTIZATIONS = dict.fromkeys(("fp8", "int8"), Quantization(8))
QUANTIZATIONS |= dict.fromkeys(("int4", "gptq", "awq"), Quantization(4, 128, True))
"""Quantizations by their names in ``dllm plan --quantization``."""
