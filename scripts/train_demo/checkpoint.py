"""Checkpoint folders and the rows of their model cards."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save

from dllm_engine.demo import DEMO_MODEL_DIR
from dllm_engine.demo.tasks import Example, make_examples

from . import samples
from .network import DemoModel, ModelSettings
from .samples import BOS, EOS, PAD, VOCAB_SIZE
from .training import TrainingSettings

PROGRESS_EXAMPLES = 32
MAX_POSITIONS = 2048


@dataclass(frozen=True)
class Evaluation:
    """One row of a model card: a task at a fixed number of pairs or words (None: 2 up to the longest trained)."""

    task: str
    pairs: int | None = None
    filler: float = 0.0
    threshold: float | None = None
    """Of parallel unmasking; None: one token per step."""

    def examples(self, count: int) -> list[Example]:
        """Held out: training draws other seeds."""
        return make_examples(self.task, count, 0, min_pairs=self.pairs, max_pairs=self.pairs, filler=self.filler)


PROGRESS_ROWS = [
    Evaluation(task, pairs)
    for task, pairs in (("names", 12), ("keys", 12), ("facts", 12), ("reverse", 8), ("copy", 12))
]
_SIZES = {"names": (8, 24, 36), "keys": (8, 16, 24), "facts": (8, 16, 24), "reverse": (8, 10, 12), "copy": (8, 16)}
_WITH_FILLER = {"names": (16, 0.6), "keys": (12, 0.6), "facts": (12, 0.6), "reverse": (8, 0.8), "copy": (8, 0.8)}
CARD_ROWS = [
    row
    for task, sizes in _SIZES.items()
    for row in (*(Evaluation(task, pairs) for pairs in sizes), Evaluation(task, *_WITH_FILLER[task]))
]


def save_checkpoint(model: DemoModel, name_of: Callable[[str], str], configs: dict[str, Any], out: Path) -> None:
    """Write the weights in bf16 under the names that ``name_of`` gives them, and ``configs`` as JSON files."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name_of(name): p.detach().bfloat16() for name, p in model.named_parameters()}
    (out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    for name, content in configs.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def copy_from_demo(out: Path, *names: str) -> None:
    """Copy files that are those of the demo model, such as its tokenizer."""
    for name in names:
        if not (out / name).is_symlink():  # as those in the package are
            shutil.copyfile(DEMO_MODEL_DIR / name, out / name)


def llama_config(settings: ModelSettings) -> dict[str, Any]:
    """What config.json of a Llama and of an SDAR have in common."""
    return {
        "hidden_size": settings.d_model,
        "intermediate_size": settings.mlp_hidden_size,
        "num_hidden_layers": settings.n_layers,
        "num_attention_heads": settings.n_heads,
        "num_key_value_heads": settings.n_kv_heads,
        "head_dim": settings.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": settings.rms_norm_eps,
        "rope_theta": settings.rope_theta,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "torch_dtype": "bfloat16",
    }


LLAMA_NAMES = {
    r"wte\.": "model.embed_tokens.",
    r"blocks\.(\d+)\.attn_norm\.": r"model.layers.\1.input_layernorm.",
    r"blocks\.(\d+)\.([qkv]_proj)\.": r"model.layers.\1.self_attn.\2.",
    r"blocks\.(\d+)\.([qk]_norm)\.": r"model.layers.\1.self_attn.\2.",
    r"blocks\.(\d+)\.attn_out\.": r"model.layers.\1.self_attn.o_proj.",
    r"blocks\.(\d+)\.ff_norm\.": r"model.layers.\1.post_attention_layernorm.",
    r"blocks\.(\d+)\.ff_proj\.": r"model.layers.\1.mlp.gate_proj.",
    r"blocks\.(\d+)\.up_proj\.": r"model.layers.\1.mlp.up_proj.",
    r"blocks\.(\d+)\.ff_out\.": r"model.layers.\1.mlp.down_proj.",
    r"ln_f\.": "model.norm.",
    r"ff_out\.": "lm_head.",
}


def llama_name(name: str) -> str:
    """The tensor name of Llama and SDAR for a parameter of the network."""
    for pattern, replacement in LLAMA_NAMES.items():
        if match := re.match(pattern, name):
            return match.expand(replacement) + name[match.end() :]
    raise ValueError(f"no Llama tensor is known for parameter {name!r}")


def table_row(cells: Iterable[object]) -> str:
    """A row of a model card's table, printed as well."""
    row = "| " + " | ".join(map(str, cells)) + " |"
    print(row, flush=True)
    return row


def write_model_card(
    name: str, model: DemoModel, training: TrainingSettings, rows: list[str], out: Path, **facts: Any
) -> None:
    """Fill the template ``name`` in this folder and write it as README.md."""
    template = (Path(__file__).parent / name).read_text(encoding="utf-8")
    facts |= {"shape": model.settings, "training": training, "samples": samples, "table": "\n".join(rows)}
    text = template.format(parameters=model.num_parameters / 1e6, **facts)
    (out / "README.md").write_text(text, encoding="utf-8")
