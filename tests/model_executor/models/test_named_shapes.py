"""Named shapes, whole and scaled down."""

import pytest

from dllm_engine.checkpoints import NAMED_SHAPES, is_named_shape, load_config, named_shape


def test_a_named_shape_is_that_of_the_released_checkpoint():
    config = named_shape("llada-8b")
    assert (config["d_model"], config["n_heads"], config["n_layers"], config["vocab_size"]) == (4096, 32, 32, 126_464)


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "kv_heads", "layers", "mlp"),
    [
        ("llada-8b/4", 1024, 8, 8, 8, 3072),
        ("dream-7b/7", 512, 4, 1, 4, 2706),
        ("llada-moe-7b/4", 512, 4, 4, 4, None),
        ("dream-7b/2", 1792, 14, 2, 14, 9472),
    ],
)
def test_a_scaled_shape_keeps_the_size_of_its_heads(name, hidden, heads, kv_heads, layers, mlp):
    config = load_config(name)
    assert config.hidden_size == hidden
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
    assert (config.num_hidden_layers, config.intermediate_size) == (layers, mlp)
    assert config.hidden_size // config.num_attention_heads == 128
    assert config.mask_token_id == config.vocab_size - 1


@pytest.mark.parametrize("name", ["llada-8b/3", "llada-8b/0", "llada-8b/", "llada-8b/x"])
def test_heads_must_divide(name):
    with pytest.raises(ValueError, match="divided by one of 1, 2, 4, 8, 16, 32"):
        named_shape(name)


@pytest.mark.parametrize("name", NAMED_SHAPES)
def test_each_shape_has_a_config(name):
    assert load_config(name).num_hidden_layers > 1


def test_other_names_are_no_shapes():
    assert is_named_shape("dream-7b/4")
    assert not is_named_shape("demo")
    with pytest.raises(ValueError, match="unknown"):
        named_shape("llama-8b")
