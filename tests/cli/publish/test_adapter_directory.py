"""`weightwire publish` of a directory that PEFT has saved, and what comes out of the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

from support.commands import bits_of, weightwire


def test_a_peft_directory_is_published_and_restored_as_one(tmp_path: Path) -> None:
    adapter, bucket = tmp_path / "adapter", tmp_path / "bucket"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    factor = np.ones((2, 4), np.float32)
    for step in range(2):
        weights = {"base_model.model.a.lora_A.weight": factor + step}
        safetensors.numpy.save_file(weights, adapter / "adapter_model.safetensors", {"format": "pt"})
        assert weightwire("publish", adapter, bucket).code == 0
    assert weightwire("restore", bucket, "-o", tmp_path / "restored").code == 0
    assert weightwire("follow", bucket, "--into", tmp_path / "replica", "--once").code == 0
    for directory in (tmp_path / "restored", tmp_path / "replica" / "current"):
        names = ["adapter_config.json", "adapter_model.safetensors", "weightwire.json"]
        assert sorted(path.name for path in directory.iterdir()) == names
        assert bits_of(directory) == bits_of(adapter)
