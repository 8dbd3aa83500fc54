"""Which rank publishes which rows."""

from __future__ import annotations

import numpy as np
import pytest

from support.rank_circle import Arrays, initial, shard
from weightwire.errors import CheckpointError
from weightwire.publisher.ranks.partition import holdings_of, partition_rows
from weightwire.weights.source import read_weights
from weightwire.weights.tensor import Tensor


class TestPartition:
    def share(self, *ranks: Arrays) -> list[set[str]]:
        return [set(names) for names in partition_rows([holdings_of(read_weights(one), {}) for one in ranks]).names]

    def test_tensors_that_all_ranks_hold_are_spread_by_size(self) -> None:
        whole = {name: np.zeros(size, np.uint8) for name, size in {"a": 8, "b": 5, "c": 4, "d": 1}.items()}
        assert self.share(whole, whole) == [{"a", "d"}, {"b", "c"}]

    def test_a_rank_with_its_own_rows_gets_fewer_shared_tensors(self) -> None:
        part = Tensor(read_weights({"w": np.zeros(9, np.uint8)})["w"].dtype, (9,), np.zeros(9, np.uint8), (0, 9))
        assert self.share({"w": part, "x": np.zeros(4)}, {"x": np.zeros(4)}) == [{"w"}, {"x"}]

    def test_rows_that_two_ranks_hold_are_published_by_one(self) -> None:
        """As in HSDP, where shards are replicated."""
        weights = {"layer.weight": initial()["layer.weight"]}
        ranks = [shard(weights, rank, 2) for rank in (0, 1, 0, 1)]
        assert self.share(*ranks) == [{"layer.weight"}, {"layer.weight"}, set(), set()]

    def test_rows_that_no_rank_holds_are_refused(self) -> None:
        weights = {"w": np.zeros((9, 2))}
        for ranks, missing in {(0, 1): "6 to 9", (1, 2): "0 to 3", (0, 2): "3 to 6"}.items():
            with pytest.raises(CheckpointError, match=f"'w': no rank holds rows {missing}"):
                self.share(*(shard(weights, rank, 3) for rank in ranks))

    def test_overlapping_rows_are_refused(self) -> None:
        weights = {"w": np.zeros((6, 2))}
        with pytest.raises(CheckpointError, match="rows 2 to 3 are in two shards"):
            self.share(shard(weights, 0, 2), *(shard(weights, rank, 3) for rank in (1, 2)))
        with pytest.raises(CheckpointError, match="are in two shards"):
            self.share(weights, shard(weights, 0, 2))

    def test_different_shapes_of_a_tensor_are_refused(self) -> None:
        with pytest.raises(CheckpointError, match=r"is F64 \[3\] on rank 0, but F64 \[4\] on rank 1"):
            self.share({"w": np.zeros(3)}, {"w": np.zeros(4)})
