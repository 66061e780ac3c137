"""Model families: the table of their facts, and facts from configs."""

from dllm_engine.families.block_attention import LLADA2, SDAR, SDAR_MOE
from dllm_engine.families.config_tokens import (
    barred_tokens,
    every_end_token,
    model_end_tokens,
    released_defaults,
)
from dllm_engine.families.family import (
    TRANSFORMERS_NAMES,
    Attention,
    BlockOrigin,
    ExpertShape,
    KeysForm,
    ModelFamily,
    NamedModules,
    ScheduleKind,
    Shape,
    Shard,
    TensorNames,
)
from dllm_engine.families.full_attention import DREAM, LLADA, LLADA_MOE
from dllm_engine.families.table import FAMILIES, NOT_SUPPORTED

__all__ = [
    "DREAM",
    "FAMILIES",
    "LLADA",
    "LLADA2",
    "LLADA_MOE",
    "NOT_SUPPORTED",
    "SDAR",
    "SDAR_MOE",
    "TRANSFORMERS_NAMES",
    "Attention",
    "BlockOrigin",
    "ExpertShape",
    "KeysForm",
    "ModelFamily",
    "NamedModules",
    "ScheduleKind",
    "Shape",
    "Shard",
    "TensorNames",
    "barred_tokens",
    "every_end_token",
    "model_end_tokens",
    "released_defaults",
]
