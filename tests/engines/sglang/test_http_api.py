"""Every request that is sent to SGLang fits the request classes of its wheels, by the table read from them."""

from __future__ import annotations

import base64
import io
import json
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.fake_sglang import TABLE, complaint
from weightwire.engines.orders import Order
from weightwire.engines.sglang import http_api
from weightwire.engines.sglang.order_payload import pack_order, unpack_order

ORDER = Order("swap", "/dev/shm/weightwire-0-1", "a1", "/tmp/ä.safetensors", "r" * 32, 7, "s" * 32)
VERSIONS = sorted(TABLE)


def calls(has_session: bool) -> list[http_api.Call]:
    both = [http_api.BEGIN, http_api.END] if has_session else []
    pauses = [http_api.pause(mode) for mode in ("in_place", "retract", "abort")]
    return [
        *both,
        *pauses,
        http_api.CONTINUE,
        http_api.FLUSH,
        http_api.send_order(pack_order(ORDER), 2, has_session),
        http_api.load_checkpoint(Path("/data/replica")),
        http_api.set_version("7"),
    ]


def test_table_holds_versions_with_and_without_sessions() -> None:
    assert VERSIONS == ["0.5.12", "0.5.20", "0.5.23"]
    assert ["/begin_weight_update" in TABLE[one]["endpoints"] for one in VERSIONS] == [False, False, True]


@pytest.mark.parametrize("version", VERSIONS)
def test_request_fits_the_classes_of_the_wheel(version: str) -> None:
    has_session = "/begin_weight_update" in TABLE[version]["endpoints"]
    assert [complaint(version, one.path, one.body) for one in calls(has_session)] == [""] * len(calls(has_session))


@pytest.mark.parametrize("version", VERSIONS)
def test_table_notices_requests_of_the_other_kind(version: str) -> None:
    has_session = "/begin_weight_update" in TABLE[version]["endpoints"]
    wrong = http_api.send_order(pack_order(ORDER), 1, not has_session)
    assert "does not fit None" in complaint(version, wrong.path, wrong.body)
    assert "is missing" in complaint(version, "/update_weights_from_disk", {})
    assert "does not fit" in complaint(version, "/pause_generation", {"mode": "keep"})


@pytest.mark.parametrize("version", VERSIONS)
def test_servers_tell_the_settings_that_are_asked_for(version: str) -> None:
    wanted = {"custom_weight_loader", "dp_size", "enable_eplb", "nnodes", "pp_size", "quantization", "tp_size"}
    assert set(TABLE[version]["settings"]) == wanted
    assert {"/server_info", "/model_info", "/flush_cache"} <= set(TABLE[version]["endpoints"])


def test_order_travels_as_a_tensor_of_bytes() -> None:
    data = base64.b64decode(pack_order(ORDER))
    loaded = pickle.load(io.BytesIO(data))
    [(name, tensor)] = loaded
    assert (name, tensor.dtype) == ("weightwire", torch.uint8)
    assert unpack_order(loaded) == ORDER


def test_pickled_order_names_nothing_but_a_tensor_of_bytes() -> None:
    """SGLang unpickles only names that it knows."""
    data = base64.b64decode(pack_order(ORDER))
    assert [value for opcode, value, _ in pickletools.genops(data) if opcode.name == "GLOBAL"] == ["torch ByteTensor"]


def test_order_is_packed_without_torch() -> None:
    code = "import sys, weightwire.engines.sglang.sglang_engine; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.parametrize("named", [[], [("model.embed", torch.ones(2))]])
def test_other_tensors_are_not_an_order(named: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(ValueError, match="not an order of weightwire"):
        unpack_order(named)


def test_order_of_another_version_is_refused() -> None:
    data = json.dumps({"action": "swap", "colour": "red"}).encode()
    with pytest.raises(ValueError, match="another version of weightwire"):
        unpack_order([("weightwire", torch.tensor(list(data), dtype=torch.uint8))])
