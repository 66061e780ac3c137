"""Folders of released checkpoints as the Hub has them, with random weights: the same
files, keys and special tokens.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support import tiny_checkpoints

RELEASED: dict[str, dict[str, Any]] = {
    name: entry
    for entry in json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    )
    for name in entry["checkpoints"]
}
"""By the name of a checkpoint: its ``config``, and what follows from other files."""
FOLDERS = [name for name, entry in RELEASED.items() if "added_tokens" in entry]
"""Checkpoints of which all files are known."""
_FAMILIES = {
    config["architectures"][0]: name
    for name, config in tiny_checkpoints.CONFIGS.items()
}
_NARROW: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(name: str, parent: Path, *, is_narrow: bool = True) -> Path:
    """The folder of a released checkpoint; ``is_narrow``: with two narrow layers under
    its vocabulary.
    """
    released, folder = RELEASED[name], parent / name.partition("/")[2]
    config = dict(released["config"])
    if is_narrow:
        config |= _NARROW
        if "head_dim" in config:
            config["head_dim"] = 24
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:2]
    family = _FAMILIES.get(config["architectures"][0], "open_dcoder")
    sizes = {
        name: value
        for name, value in config.items()
        if name not in ("architectures", "model_type")
    }
    tiny_checkpoints.write(
        family,
        folder,
        edit=lambda tensors: _as_trained(tensors, released),
        **{"torch_dtype": config.get("dtype")} | sizes,
    )
    if num_files := released.get("num_files"):
        tiny_checkpoints.shard(folder, num_files)
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", released["generation_config"])
    _write_tokenizer(folder, released)
    return folder


def _as_trained(tensors: tiny_checkpoints.Tensors, released: dict[str, Any]) -> None:
    """Make the mask improbable, and store a tied head where the release does."""
    if released.get("stores_tied_head"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "head.weight")):
            tensor[released["mask_token_id"]] *= 0.1


def _write_tokenizer(folder: Path, released: dict[str, Any]) -> None:
    """One that spells bytes, with the special tokens at their places."""
    special = {int(number): text for number, text in released["added_tokens"].items()}
    letters = [*bytes_to_unicode().values()]
    others = (number for number in range(max(special)) if number not in special)
    vocabulary = {
        letters[i] if i < len(letters) else f"unused {i}": number
        for i, number in enumerate(others)
    }
    tokenizer = Tokenizer(
        models.BPE(vocabulary | {text: number for number, text in special.items()}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": special[released["config"]["eos_token_id"]]}
    stated = named | {
        "added_tokens_decoder": {
            str(number): {"content": text, "special": True}
            for number, text in special.items()
        },
        "tokenizer_class": released["tokenizer_class"],
        "clean_up_tokenization_spaces": False,
    }
    _write(folder / "tokenizer_config.json", stated)
    _write(folder / "special_tokens_map.json", named)
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
