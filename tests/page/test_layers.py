"""Tensors are grouped into the rows of the heat map, in model order."""

from __future__ import annotations

from weightwire.page.layers import rows_of

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def tensors(*names: str) -> Tensors:
    return dict.fromkeys(names, ("BF16", (2, 3)))


def labels(given: Tensors) -> list[str]:
    return [row.label for row in rows_of(given)]


def test_each_layer_and_each_other_module_is_a_row() -> None:
    names = [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.10.mlp.up_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.norm.weight",
    ]

    rows = rows_of(tensors(*names))

    assert [row.label for row in rows] == [
        "model.embed_tokens",
        "model.layers.2",
        "model.layers.10",
        "model.norm",
        "lm_head",
    ]
    assert rows[1].tensors == ("model.layers.2.mlp.up_proj.weight", "model.layers.2.self_attn.q_proj.weight")
    assert rows[1].parameters == 12


def test_experts_belong_to_their_layer() -> None:
    assert labels(tensors("model.layers.1.mlp.experts.7.w1", "model.layers.1.mlp.experts.8.w1")) == ["model.layers.1"]


def test_layers_of_other_model_families_are_recognized() -> None:
    names = ("h.0.attn.weight", "wte.weight", "ln_f.weight", "encoder.layer.3.w", "decoder.layer.0.w")
    assert labels(tensors(*names)) == ["wte", "decoder.layer.0", "encoder.layer.3", "h.0", "ln_f"]


def test_a_number_within_a_word_is_not_a_layer() -> None:
    assert labels(tensors("conv2d.weight", "fc1.bias", "fc1.weight")) == ["conv2d", "fc1"]


def test_every_tensor_has_exactly_one_row() -> None:
    given = tensors("a", "a.weight", "0.weight", "b.0", "x..3.y", "", ".", "1", "<script>.4.w")
    found = [name for row in rows_of(given) for name in row.tensors]
    assert sorted(found) == sorted(given)


def test_many_layers_share_rows() -> None:
    given = tensors("embed.weight", *(f"layers.{layer}.weight" for layer in range(200)))

    rows = rows_of(given)

    assert len(rows) == 101
    assert (rows[1].label, rows[1].parameters) == ("layers.0-1", 12)


def test_the_number_of_rows_is_limited() -> None:
    odd = tensors(
        *(f"part{index}.weight" for index in range(500)), *(f"s{n}.{k}.w" for n in range(300) for k in (0, 1))
    )
    rows = rows_of(odd)
    assert len(rows) <= 130
    assert sum(row.parameters for row in rows) == 6 * len(odd)


def test_no_tensors_give_no_rows() -> None:
    assert rows_of({}) == ()
