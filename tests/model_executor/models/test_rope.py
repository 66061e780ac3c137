"""RoPE as configs state it, in every family and spelling, against a plain version."""

import json
from typing import Any

import pytest
import torch

from dllm_engine.decoding.page_layout import head_dim_of
from dllm_engine.model_executor.models.configs import parse_config
from dllm_engine.model_executor.models.decoder import rope_table
from tests.model_executor.models.test_forward import assert_close, dense_logits
from tests.oracles.models import PlainModel, rope_speeds
from tests.support import tiny_checkpoints
from tests.support.engines import runner_of, tokens_of

FAMILIES = ("llada", "llada_moe", "dream", "sdar", "sdar_moe", "illada", "llada2")
CPU = torch.device("cpu")
CONFIGS = {family: tiny_checkpoints.CONFIGS[family] for family in FAMILIES}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 3},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 40},
}
YARNS: Any = [
    {"attention_factor": 1.7},
    {"beta_fast": 8, "beta_slow": 2.0},
    {"truncate": False},
    {"mscale": 1.2, "mscale_all_dim": 0.7},
]
CASES = [(family, kind, {}) for family in CONFIGS for kind in SCALINGS]
CASES += [(family, "yarn", more) for family in ("llada", "llada2") for more in YARNS]


def spellings(kind: str, base: float, **more: Any) -> dict[str, dict[str, Any]]:
    """Keys that state the same RoPE."""
    theta = {"rope_theta": base}
    scaling = SCALINGS[kind] | more
    old = {"type": kind} | scaling
    new = {"rope_type": kind} | scaling
    return {
        "rope_scaling with type": theta | {"rope_scaling": old},
        "rope_scaling": theta | {"rope_scaling": new},
        "rope_parameters": {"rope_parameters": new | theta},
        "both, and the base twice": theta
        | {"rope_scaling": old, "rope_parameters": new | theta},
    }


def stating(family: str, rope: dict[str, Any]) -> dict[str, Any]:
    """The family's config with other keys of RoPE."""
    return {
        name: value
        for name, value in CONFIGS[family].items()
        if not name.startswith("rope_")
    } | rope


def plain_table(stated: dict[str, Any], num_positions: int, width: int) -> torch.Tensor:
    speed, scale = rope_speeds(stated, width, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * speed
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * scale).float()


@pytest.mark.parametrize(("family", "kind", "more"), CASES)
def test_each_spelling_means_the_same(family, kind, more):
    for keys in spellings(kind, 50_000.0, **more).values():
        config = parse_config(stating(family, keys), "folder")
        width = int(head_dim_of(config) * (0.5 if family == "llada2" else 1))
        expected = plain_table(config.to_dict() | keys, 300, width)
        torch.testing.assert_close(
            rope_table(config, 300, CPU), expected, atol=2e-5, rtol=0
        )
        assert (config.rope_theta, config.rope_parameters["rope_type"]) == (
            50_000.0,
            kind,
        )
        assert config.longest_sequence == {"linear": 640, "dynamic": 768}.get(kind, 256)
        saved = json.loads(config.to_json_string()) | {"model_type": config.model_type}
        assert parse_config(saved, "folder").rope_parameters == config.rope_parameters


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", CONFIGS)
def test_models_compute_with_it(engines, tmp_path, family, kind):
    longest = {"llada": "max_sequence_length"}.get(family, "max_position_embeddings")
    spelling = (
        "rope_scaling with type" if family in ("dream", "sdar") else "rope_parameters"
    )
    stated = {longest: 64, "rope_theta": None, "rope_scaling": None} | spellings(
        kind, 3000.0
    )[spelling]
    folder = tiny_checkpoints.write(family, tmp_path, seed=3, **stated)
    llm = engines(folder, max_model_len=None)
    served = llm.model_config.max_model_len
    assert served == {"linear": 160, "dynamic": 192}.get(kind, 64)
    plain = PlainModel(folder, served)
    ids = torch.randint(
        0,
        tiny_checkpoints.VOCAB_SIZE,
        (served,),
        generator=torch.Generator().manual_seed(1),
    ).tolist()
    assert_close(
        dense_logits(llm, ids, block_length=plain.block_length)[0], plain.logits(ids)
    )


def test_dynamic_scaling_is_for_the_longest_canvas_that_is_served(engines, tmp_path):
    rope: dict[str, Any] = {
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 64,
    }
    folder = tiny_checkpoints.write("sdar", tmp_path, **rope)
    for asked, positions in ((64, 64), (90, 92)):
        table = runner_of(engines(folder, max_model_len=asked)).model.rotary_table.cpu()
        expected = plain_table(rope | {"rope_theta": 1_000_000}, positions, 24)
        torch.testing.assert_close(table, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"rope_parameters": {"rope_theta": 5e4}},
            "rope_theta=10000.0, but rope_theta=50000.0 elsewhere",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "rope_type='linear', but rope_type='default' elsewhere; state one of them",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "but rope_type='yarn' elsewhere",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "RoPE: key rope_type='longrope': Input should be 'default', 'linear',",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "RoPE: rope_type='linear' needs a factor",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "RoPE: key factor=0: Input should be greater than 0",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": 4}},
            "RoPE: unknown key 'mrope_section'=4",
        ),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"rope_scaling": [2.0]}, "rope_scaling=[2.0]"),
        ({"rope_type": "linear"}, "rope_type='linear': not known of"),
    ],
)
@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_what_is_not_supported_or_differs_is_named(family, keys, message):
    with pytest.raises(ValueError, match=r"^folder/config\.json: ") as caught:
        parse_config(stating(family, {"rope_theta": 1e4} | keys), "folder")
    assert message in str(caught.value)


def test_a_part_of_a_head_is_turned_in_llada2_alone():
    stated = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    for family, config in CONFIGS.items():
        keys = {
            name: value
            for name, value in stating(family, stated).items()
            if name != "partial_rotary_factor"
        }
        if family != "llada2":
            with pytest.raises(
                ValueError,
                match=r"partial_rotary_factor=0\.25 is not supported, only 1",
            ):
                parse_config(keys, "folder")
            continue
        assert rope_table(parse_config(keys, "folder"), 9, CPU).shape == (9, 4)
        with pytest.raises(
            ValueError, match="rotary_dim=4, but partial_rotary_factor turns 8"
        ):
            parse_config(config | {"rotary_dim": 4}, "folder")


@pytest.mark.parametrize(
    "stated",
    [{}, {"rope_scaling": {"type": "dynamic", "factor": 3}}],
    ids=["none", "dynamic"],
)
def test_an_override_takes_the_place_of_what_the_file_states(engines, tmp_path, stated):
    rope: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
    plain = tiny_checkpoints.write("dream", tmp_path / "plain", **stated)
    stretched = tiny_checkpoints.write(
        "dream", tmp_path / "stretched", rope_parameters=rope
    )
    asked: dict[str, Any] = {
        "prompt": [*range(30)],
        "gen_length": 20,
        "ignore_eos": True,
    }
    expected = tokens_of(engines(stretched, max_model_len=None), **asked)
    assert expected != tokens_of(engines(plain), **asked)

    def stretch(config):
        config.rope_parameters = rope
        return config

    for overrides in ({"rope_parameters": rope}, {"rope_scaling": rope}, stretch):
        llm = engines(plain, hf_overrides=overrides, max_model_len=None)
        assert llm.model_config.max_model_len == 1024
        assert tokens_of(llm, **asked) == expected
